"""Everything that a local run knows and checks of its order before it starts an engine or writes anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.null_engine import is_null_url, parse_null_url
from gristmill.jobs.client import to_absolute
from gristmill.jobs.errors import JobsError
from gristmill.jobs.identity import job_identity
from gristmill.jobs.input.reading import is_typed, load_columns
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.output.schema import build_part_schema
from gristmill.jobs.owner import Owner
from gristmill.jobs.plan.cutting import MAX_KEPT_BYTES, plan_job_shards
from gristmill.jobs.plan.starting import discard_unused
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.records import JobRecord
from gristmill.jobs.regroup.regroup import StoppedError, regroup
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store

NULL_ROWS_PER_S = 10_000.0  # an engine without weights needs no learning


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """A job spec that can be run here, and what was found out about it."""

    spec: JobSpec  # with absolute paths
    sources: list[Source]
    prompt_source: PromptSource
    schema: pa.Schema  # of the parts
    fingerprint: str
    identity: str

    @property
    def assumed_rows_per_s(self) -> float | None:
        """The rate to plan with where none was learned."""
        if not is_null_url(self.spec.model):
            return None
        delay_s = parse_null_url(self.spec.model).delay_s
        return min(NULL_ROWS_PER_S, 1.0 / delay_s) if delay_s else NULL_ROWS_PER_S


def load_order(spec: JobSpec) -> LocalOrder:
    """Reads heads of inputs and headers of the model; raises RefusedError or ModelRefused, writes nothing."""
    spec = to_absolute(spec)  # the same order whatever the working directory of the next run is
    if not is_null_url(spec.model):
        spec = spec.model_copy(update={"model": os.path.abspath(spec.model)})
    sources = load_sources(spec.input, spec.input_format, spec.output)
    columns = load_columns(sources)
    prompt_source = PromptSource(spec, columns)
    schema = build_part_schema(spec.keep, columns, is_typed(sources))
    if is_null_url(spec.model):
        parse_null_url(spec.model)
    else:
        check_quantization(load_checkpoint(spec.model), spec.quantization)
    model_fingerprint = fingerprint(spec.model, resolve_dtype(spec.dtype), spec.quantization, spec.kv_dtype)
    return LocalOrder(
        spec=spec,
        sources=sources,
        prompt_source=prompt_source,
        schema=schema,
        fingerprint=model_fingerprint,
        identity=job_identity(sources, spec, model_fingerprint),
    )


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The shards of a new job. With `spool_id` its rows lie sorted in the output folder's spool."""

    plan: Plan
    spool_id: int | None = None
    note: str | None = None  # what was found, for people
    regrouped: Mapping[str, Any] | None = None  # the same, for the job's history


@contextmanager
def planned_order(
    order: LocalOrder,
    store: Store,
    storage: Storage,
    should_stop: Callable[[], bool],
    note: Callable[[str], None],
) -> Iterator[LocalPlan]:
    """A plan for the block that begins the job; at its end the plan's spool goes, unless the job has begun."""
    planned = plan_order(order, store, storage, should_stop)
    if planned.note:
        note(planned.note)
    try:
        yield planned
    finally:
        if planned.spool_id is not None:
            with suppress(JobsError):
                discard_unused(store, storage, order.spec.output, planned.spool_id)


def create_job(order: LocalOrder, planned: LocalPlan, store: Store, owner: Owner) -> JobRecord:
    """The job in the database, held by `owner`."""
    return store.jobs.create(
        order.spec,
        order.sources,
        planned.plan,
        order.fingerprint,
        order.identity,
        order.schema,
        owner,
        planned.regrouped,
    )


def plan_order(
    order: LocalOrder, store: Store, storage: Storage, should_stop: Callable[[], bool]
) -> LocalPlan:
    """The shards of a new job: about 30 seconds of work, less where large rows are kept.

    Where that pays, its rows are sorted by prefix first. Raises KeyboardInterrupt where that is stopped.
    """
    spec = order.spec
    learned = store.jobs.learned_rows_per_s(order.fingerprint, spec.max_tokens)
    rows_per_s = learned or order.assumed_rows_per_s
    plan = plan_job_shards(
        order.sources,
        spec.shard_rows,
        rows_per_s,
        spec.limit,
        keeps_columns=bool(spec.keep),
        max_kept_bytes=MAX_KEPT_BYTES,
    )
    try:
        found = regroup(spec, order.sources, order.prompt_source, plan, storage, lambda: not should_stop())
    except StoppedError:
        raise KeyboardInterrupt from None
    return LocalPlan(found.plan, found.spool_id, found.note, found.figures) if found else LocalPlan(plan)
