"""Starting a planned job: regrouped by prefix where that pays.

A spool is whole before the shards that need it exist, and goes only when it is sure that none do. What a killed
planner leaves of one is swept at the job's end, or when the folder is cleared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gristmill.jobs.errors import JobIsLive, RefusedError
from gristmill.jobs.owner import Owner
from gristmill.jobs.plan.order import Order, build_prefix_key
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.regroup.regroup import Regrouping, StoppedError, regroup
from gristmill.jobs.regroup.spool import delete_spool, is_spool_of
from gristmill.jobs.source import Plan
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job that can be started."""

    job_id: str
    order: Order
    plan: Plan


def start_planned(
    store: Store,
    storage: Storage,
    owner: Owner,
    planned: PlannedJob,
    is_stopping: Callable[[], bool],
    free_output: Callable[[int | None], bool | None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> bool:
    """Puts the job in progress; False when somebody else did, or it was stopped. `owner` has the right to plan it.

    A sort ends early where this process is to end; `note` hears what it found. `free_output` makes room in the
    folder, except for the spool of this id; False: the job is not to be started.
    """
    job_id, order = planned.job_id, planned.order
    prompts = PromptSource(order.spec, order.columns)
    try:
        regrouping = regroup(
            order.spec,
            order.sources,
            prompts,
            planned.plan,
            storage,
            lambda: not is_stopping() and store.plans.renew(job_id, owner),
        )
    except StoppedError:
        return False
    if regrouping is not None:
        note(regrouping.note)
    is_started = False
    try:
        is_ours = free_output(regrouping.spool_id if regrouping else None) is not False
        is_started = is_ours and _start(store, planned, regrouping)
    except (RefusedError, JobIsLive):
        if regrouping is not None:
            _discard_unused(store, storage, job_id, regrouping.spool_id)
        raise
    if regrouping is not None and not is_started:
        _discard_unused(store, storage, job_id, regrouping.spool_id)
    return is_started


def _discard_unused(store: Store, storage: Storage, job_id: str, spool_id: int) -> None:
    """Removes a spool, unless the job has begun with it."""
    if not any(is_spool_of(shard.range, spool_id) for shard in store.shards.spooled(job_id)):
        delete_spool(storage, spool_id)


def _start(store: Store, planned: PlannedJob, regrouping: Regrouping | None) -> bool:
    order = planned.order
    return store.plans.start(
        planned.job_id,
        order.sources,
        order.columns,
        regrouping.plan if regrouping else planned.plan,
        order.part_schema,
        order.identity,
        build_prefix_key(order.spec),
        regrouping.figures if regrouping else None,
    )
