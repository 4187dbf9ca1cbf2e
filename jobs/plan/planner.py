"""Planning a job of the queue, as any worker may do it: checks of the order, then shards, then the job starts.

The database decides who plans. What can't be planned fails with its reason; an outage leaves the job as it is, to
be tried again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from gristmill.jobs.errors import JobIsLive, OutputError, RefusedError, SourceError, Unavailable
from gristmill.jobs.identity import job_identity
from gristmill.jobs.input.reading import is_typed, load_columns
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.output.publishing import check_output, clear_output
from gristmill.jobs.output.schema import build_part_schema
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.plan.cutting import (
    MAX_KEPT_BYTES,
    MAX_UNLEARNED_SHARD_ROWS,
    MIN_SHARD_ROWS,
    learned_shard_rows,
    load_row_bytes,
    plan_job_shards,
    smaller_shard_rows,
)
from gristmill.jobs.plan.pieces import (
    cut_pieces,
    is_large,
    join_pieces,
    plan_piece,
    ranges_from_json,
    ranges_to_json,
)
from gristmill.jobs.plan.starting import StartOrder, start_planned
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.records import JobRecord
from gristmill.jobs.source import Plan, PlanPiece, ShardRange, Source
from gristmill.jobs.spec import JobSpec, parse_spec
from gristmill.jobs.states import RESUMABLE_JOB_STATES, TERMINAL_JOB_STATES, JobState
from gristmill.jobs.storage.allowed import check_allowed
from gristmill.jobs.storage.folder import S3_SCHEME, open_storage
from gristmill.jobs.store.store import Store

MIN_JOB_SHARDS = 16  # where there is work enough: so that several workers take part
MIN_SHARD_S = 1.0
_MIN_PREFIX_SIZE = 16


@dataclass(frozen=True, slots=True)
class _CheckedOrder:
    """A submitted job whose order can be carried out, and what was found out about it."""

    spec: JobSpec
    sources: list[Source]
    columns: list[str]
    part_schema: bytes
    identity: str
    replaces: bool  # the output holds an earlier job's files, which are to go


def plan_submitted_job(
    store: Store,
    job_id: str,
    owner: Owner,
    allow: Sequence[str],
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[int]:
    """Plans a job and starts it, or cuts a large one into pieces and returns the indexes of those to plan.

    [] also when the job is past planning or somebody else plans it. Inputs and output must lie below `allow`.
    A job that can't be carried out fails with the reason. Raises Unavailable when a service does not answer.
    """
    job = store.plans.claim(job_id, owner)
    if job is None:
        return []
    num_pieces = 0
    with _refusing(store, job_id, owner):
        order = _check_order(store, job, allow)
        if is_large(order.sources, order.spec.limit):
            pieces = cut_pieces(order.sources)
            if _free_output(store, job, owner, order, None):
                if store.pieces.save_all(
                    job_id, order.sources, order.columns, order.part_schema, order.identity, pieces
                ):
                    num_pieces = len(pieces)
        else:
            start = StartOrder(
                job_id=job_id,
                spec=order.spec,
                sources=order.sources,
                columns=order.columns,
                plan=_plan_at_once(store, order),
                part_schema=order.part_schema,
                identity=order.identity,
                prefix_key=build_prefix_key(order.spec),
            )
            free = partial(_free_output, store, job, owner, order)
            start_planned(store, open_storage(job.output), owner, start, is_stopping, free)
    return list(range(num_pieces))


def plan_one_piece(
    store: Store, job_id: str, piece_index: int, is_stopping: Callable[[], bool] = lambda: False
) -> bool:
    """Plans one piece of a large job; True when all pieces were planned and the job was started by this call.

    May be called again for a piece that is planned. Errors as in plan_submitted_job.
    """
    loaded = store.pieces.load(job_id, piece_index)
    if loaded is None:
        return False
    with _refusing(store, job_id):
        if loaded.piece.ranges is None:
            spec = _parse_spec(store.jobs.load(job_id))
            piece = PlanPiece(loaded.piece.source_index, loaded.piece.byte_offset, loaded.piece.byte_size)
            ranges = _plan_piece(store, spec, loaded.source, piece)
            is_last = store.pieces.save(job_id, piece_index, ranges_to_json(ranges))
        else:
            is_last = not store.pieces.unplanned(job_id)
        return is_last and _start_from_pieces(store, job_id, is_stopping)
    return False


def build_prefix_key(spec: JobSpec) -> str | None:
    """Equal for jobs whose prompts begin with the same text, as far as the templates tell; None: they don't."""
    system, is_whole = _fixed_head(spec.system or "")
    head = system + "\0" + _fixed_head(spec.prompt or "")[0] if is_whole else system
    if len(head) < _MIN_PREFIX_SIZE:
        return None
    return hashlib.sha256(f"{spec.model}\0{head}".encode()).hexdigest()[:32]


@contextmanager
def _refusing(store: Store, job_id: str, owner: Owner | None = None) -> Iterator[None]:
    """Fails the job for what is wrong with it; gives its plan back when a service does not answer."""
    try:
        yield
    except Unavailable:
        if owner is not None:
            with suppress(Unavailable):
                store.plans.release(job_id, owner)
        raise
    except (RefusedError, SourceError, OutputError, JobIsLive) as error:
        store.plans.refuse(job_id, str(error))


def _check_order(store: Store, job: JobRecord, allow: Sequence[str]) -> _CheckedOrder:
    """Reads heads of inputs and looks at the output; changes nothing. Raises RefusedError."""
    spec = _parse_spec(job)
    check_allowed([*spec.input, spec.output], allow)
    if "://" in job.output and not job.output.startswith(S3_SCHEME):
        raise RefusedError(f"output {job.output!r}: write a path, or s3://BUCKET/FOLDER")
    sources = load_sources(spec.input, spec.input_format, job.output)
    check_allowed([source.uri for source in sources], allow)
    columns = load_columns(sources)
    PromptSource(spec, columns)
    schema = build_part_schema(spec.keep, columns, is_typed(sources))
    identity = job_identity(sources, spec, f"{spec.model}:{spec.dtype}")  # workers map the name to weights
    return _CheckedOrder(
        spec=spec,
        sources=sources,
        columns=list(columns),
        part_schema=schema.serialize().to_pybytes(),
        identity=identity,
        replaces=_check_folder(store, job, spec, identity, sources),
    )


def _check_folder(
    store: Store, job: JobRecord, spec: JobSpec, identity: str, sources: Sequence[Source]
) -> bool:
    """Whether the output folder's files, and its unfinished jobs, have to make room for the job.

    Raises RefusedError for a folder that is another's.
    """
    others = [other for other in store.jobs.of_output(job.output) if other.job_id != job.job_id]
    pending = [
        other
        for other in others
        if other.state not in TERMINAL_JOB_STATES
        and (other.state is not JobState.VALIDATING or _age(other) < _age(job))
    ]
    latest = next((other for other in others if other.num_shards), None)  # others never began
    uris = [source.uri for source in sources]
    found = check_output(open_storage(job.output), latest, identity, spec.if_exists, uris)
    if spec.if_exists == "overwrite":
        return True
    if pending:
        raise RefusedError(
            f"the output {job.output} belongs to job {pending[0].job_id}, which is {pending[0].state}: wait for"
            " it or cancel it, choose another output, or say if_exists=overwrite"
        )
    if found == "resume" and latest is not None:
        if latest.rows_committed or latest.state not in RESUMABLE_JOB_STATES:
            go_on = "resume" if latest.state in RESUMABLE_JOB_STATES else "retry"
            raise RefusedError(
                f"{job.output} holds the output of job {latest.job_id}, which has the same input, options and"
                f" model: go on with it by `gristmill {go_on} {latest.job_id}`, or say if_exists=overwrite"
            )
        return True
    return False


def _age(job: JobRecord) -> tuple[float, str]:
    return job.created_at, job.job_id


def _free_output(
    store: Store, job: JobRecord, owner: Owner, order: _CheckedOrder, spare_spool: int | None
) -> bool:
    """Makes room in the output folder where that was asked for; False when the plan is another's by now."""
    if order.replaces:
        store.plans.take_over_output(job.job_id)
    if not store.plans.renew(job.job_id, owner):
        return False
    if order.replaces:
        clear_output(open_storage(job.output), spare_spool)
    return True


def _plan_at_once(store: Store, order: _CheckedOrder) -> Plan:
    spec = order.spec
    rows_per_s = _load_rows_per_s(store, spec)
    keeps = bool(spec.keep)
    plan = plan_job_shards(order.sources, spec.shard_rows, rows_per_s, spec.limit, keeps_columns=keeps)
    fewer = max(MIN_SHARD_ROWS, plan.num_rows // MIN_JOB_SHARDS, int(MIN_SHARD_S * (rows_per_s or 0.0)))
    if spec.shard_rows is not None or len(plan.shards) >= MIN_JOB_SHARDS:
        return plan
    if max(shard.num_rows for shard in plan.shards) <= fewer:
        return plan
    return plan_job_shards(order.sources, fewer, None, spec.limit, keeps_columns=keeps)


def _plan_piece(store: Store, spec: JobSpec, source: Source, piece: PlanPiece) -> list[ShardRange]:
    shard_rows = spec.shard_rows
    if shard_rows is None:
        rows_per_s = _load_rows_per_s(store, spec)
        shard_rows = learned_shard_rows(rows_per_s) if rows_per_s else MAX_UNLEARNED_SHARD_ROWS
    ranges = plan_piece(source, piece, shard_rows)
    if not spec.keep or spec.shard_rows is not None:
        return ranges
    fewer = smaller_shard_rows(ranges, [load_row_bytes(source)], MAX_KEPT_BYTES)
    return ranges if fewer is None else plan_piece(source, piece, fewer)


def _start_from_pieces(store: Store, job_id: str, is_stopping: Callable[[], bool]) -> bool:
    job = store.jobs.load(job_id)
    records = store.pieces.load_all(job_id)
    texts = [record.ranges for record in records if record.ranges is not None]
    if not records or len(texts) < len(records):
        return False
    pieces = [PlanPiece(record.source_index, record.byte_offset, record.byte_size) for record in records]
    owner = current_owner()
    if not store.plans.claim_start(job_id, owner):
        return False
    spec = _parse_spec(job)
    start = StartOrder(
        job_id=job_id,
        spec=spec,
        sources=job.sources,
        columns=job.columns,
        plan=join_pieces(pieces, [ranges_from_json(text) for text in texts]),
        part_schema=job.part_schema,
        identity=job.identity,
        prefix_key=build_prefix_key(spec),
    )
    return start_planned(store, open_storage(job.output), owner, start, is_stopping)


def _load_rows_per_s(store: Store, spec: JobSpec) -> float | None:
    """The lowest rate that was learned with the weights that workers now have under the model's name."""
    fingerprints = store.workers.known_models().get(spec.model, set())
    rates = [store.jobs.learned_rows_per_s(fingerprint, spec.max_tokens) for fingerprint in fingerprints]
    return min((rate for rate in rates if rate is not None), default=None)


def _parse_spec(job: JobRecord) -> JobSpec:
    return parse_spec({name: value for name, value in job.spec.items() if value is not None})


def _fixed_head(template: str) -> tuple[str, bool]:
    """A template up to its first tag, and whether that is all of it."""
    tags = [index for tag in ("{{", "{%", "{#") if (index := template.find(tag)) >= 0]
    return (template[: min(tags)], False) if tags else (template, True)
