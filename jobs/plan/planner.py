"""Planning a job of the queue, as any worker may do it: checks of the order, then shards, then the job starts.

The database decides who plans. What can't be planned fails with its reason; an outage leaves the job as it is, to
be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from gristmill.jobs.errors import JobIsLive, OutputError, RefusedError, SourceError, Unavailable
from gristmill.jobs.output.publishing import check_output, clear_output
from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.plan.cutting import (
    MAX_KEPT_BYTES,
    MAX_UNLEARNED_SHARD_ROWS,
    learned_shard_rows,
    load_row_bytes,
    smaller_shard_rows,
)
from gristmill.jobs.plan.order import Order, check_order, plan_order
from gristmill.jobs.plan.pieces import (
    cut_pieces,
    is_large,
    join_pieces,
    plan_piece,
    ranges_from_json,
    ranges_to_json,
)
from gristmill.jobs.plan.starting import PlannedJob, start_planned
from gristmill.jobs.records import JobRecord
from gristmill.jobs.source import PlanPiece, ShardRange, Source
from gristmill.jobs.spec import JobSpec, parse_spec
from gristmill.jobs.states import RESUMABLE_JOB_STATES, TERMINAL_JOB_STATES, JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.store import Store

MIN_JOB_SHARDS = 16  # where there is work enough: so that several workers take part


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
        spec = _parse_spec(job)
        order = check_order(spec, allow=allow)
        replaces = _check_folder(store, job, order)
        free = partial(_free_output, store, job, owner, replaces)
        if is_large(order.sources, spec.limit):
            pieces = cut_pieces(order.sources)
            if free(None) and store.pieces.save_all(
                job_id, order.sources, order.columns, order.part_schema, order.identity, pieces
            ):
                num_pieces = len(pieces)
        else:
            plan = plan_order(order, _load_rows_per_s(store, spec), MIN_JOB_SHARDS)
            planned = PlannedJob(job_id, order, plan)
            start_planned(store, open_storage(job.output), owner, planned, is_stopping, free)
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


def _check_folder(store: Store, job: JobRecord, order: Order) -> bool:
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
    if_exists = order.spec.if_exists
    uris = [source.uri for source in order.sources]
    found = check_output(open_storage(job.output), latest, order.identity, if_exists, uris)
    if if_exists == "overwrite":
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


def _free_output(store: Store, job: JobRecord, owner: Owner, replaces: bool, spare_spool: int | None) -> bool:
    """Makes room in the output folder where that was asked for; False when the plan is another's by now."""
    if replaces:
        store.plans.take_over_output(job.job_id)
    if not store.plans.renew(job.job_id, owner):
        return False
    if replaces:
        clear_output(open_storage(job.output), spare_spool)
    return True


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
    order = Order(spec, job.sources, job.columns, job.part_schema, "", job.identity)
    planned = PlannedJob(job_id, order, join_pieces(pieces, [ranges_from_json(text) for text in texts]))
    return start_planned(store, open_storage(job.output), owner, planned, is_stopping)


def _load_rows_per_s(store: Store, spec: JobSpec) -> float | None:
    """The lowest rate that was learned with the weights that workers now have under the model's name."""
    fingerprints = store.workers.known_models().get(spec.model, set())
    rates = [store.jobs.learned_rows_per_s(fingerprint, spec.max_tokens) for fingerprint in fingerprints]
    return min((rate for rate in rates if rate is not None), default=None)


def _parse_spec(job: JobRecord) -> JobSpec:
    return parse_spec({name: value for name, value in job.spec.items() if value is not None})
