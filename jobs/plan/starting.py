"""Starting a planned job of the queue: regrouped by prefix where that pays.

A spool is whole before the shards that need it exist, and goes only when it is sure that none do. What a killed
planner leaves of one is swept at the job's end, or when the folder is cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.jobs.errors import JobIsLive, RefusedError
from gristmill.jobs.owner import Owner
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.regroup.regroup import Regrouping, StoppedError, regroup
from gristmill.jobs.regroup.spool import delete_spool, is_spool_of
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A job that can be started, and what planning found out about it."""

    job_id: str
    spec: JobSpec
    sources: Sequence[Source]
    columns: Sequence[str]
    plan: Plan
    part_schema: bytes
    identity: str
    prefix_key: str | None


def start_planned(
    store: Store,
    storage: Storage,
    owner: Owner,
    order: StartOrder,
    is_stopping: Callable[[], bool],
    free_output: Callable[[int | None], bool] = lambda _: True,
) -> bool:
    """Puts the job in progress; False when somebody else did, or it was stopped. `owner` has the right to plan it.

    A sort ends early where this process is to end. `free_output` makes room in the folder, except for the spool of
    this id; False: the job is not to be started.
    """
    prompts = PromptSource(order.spec, order.columns)
    try:
        regrouping = regroup(
            order.spec,
            order.sources,
            prompts,
            order.plan,
            storage,
            lambda: not is_stopping() and store.plans.renew(order.job_id, owner),
        )
    except StoppedError:
        return False
    is_started = False
    try:
        is_started = free_output(regrouping.spool_id if regrouping else None) and _start(
            store, order, regrouping
        )
    except (RefusedError, JobIsLive):
        if regrouping is not None:
            discard_unused(store, storage, order.job_id, regrouping.spool_id)
        raise
    if regrouping is not None and not is_started:
        discard_unused(store, storage, order.job_id, regrouping.spool_id)
    return is_started


def discard_unused(store: Store, storage: Storage, reference: str, spool_id: int) -> None:
    """Removes a spool, unless the job of this id or output folder has begun with it."""
    job = store.jobs.find(reference)
    shards = store.shards.spooled(job.job_id) if job is not None else []
    if not any(is_spool_of(shard.range, spool_id) for shard in shards):
        delete_spool(storage, spool_id)


def _start(store: Store, order: StartOrder, regrouping: Regrouping | None) -> bool:
    return store.plans.start(
        order.job_id,
        order.sources,
        order.columns,
        regrouping.plan if regrouping else order.plan,
        order.part_schema,
        order.identity,
        order.prefix_key,
        regrouping.figures if regrouping else None,
    )
