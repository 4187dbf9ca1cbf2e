"""Which job has an output folder: one at a time, and never one that a live process still works on.

All of it happens under job_rows.lock_output, or two jobs could each believe that the folder is theirs.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, and_, or_, select, update

from gristmill.jobs.errors import JobIsLive, RefusedError
from gristmill.jobs.owner import Owner, is_alive, is_dead, is_local
from gristmill.jobs.states import (
    TERMINAL_JOB_STATES,
    TERMINAL_SHARD_STATES,
    AttemptOutcome,
    JobState,
    Runner,
    ShardState,
)
from gristmill.jobs.store.job_rows import add_event, change_job, end_job
from gristmill.jobs.store.models import attempts, jobs, shards
from gristmill.jobs.store.shard_rows import find_abandoned, load_running, off_hands

_PENDING = tuple(state for state in JobState if state not in TERMINAL_JOB_STATES)
_STARTED = tuple(state for state in _PENDING if state is not JobState.VALIDATING)


def check_holder(job: Row[Any], owner: Owner | None, now: float, lease_s: float) -> None:
    """Raises JobIsLive when a local run other than `owner` holds the job."""
    holder = Owner.from_text(job.owner) if job.owner else None
    if holder is None or holder == owner:
        return
    seen_lately = (job.owner_seen_at or 0.0) + lease_s >= now
    if is_alive(holder) if is_local(holder) else seen_lately:
        raise JobIsLive(job.id, str(holder))


def check_newest(connection: Connection, job: Row[Any]) -> None:
    """Raises RefusedError when a later job took the folder over; one that was never planned took nothing."""
    later = or_(
        jobs.c.created_at > job.created_at, and_(jobs.c.created_at == job.created_at, jobs.c.id > job.id)
    )
    taken = or_(jobs.c.num_shards > 0, jobs.c.state.in_(_PENDING))
    query = select(jobs.c.id).where(jobs.c.output == job.output, later, taken)
    newest = connection.scalar(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(1))
    if newest is not None and job.output:
        raise RefusedError(f"job {job.id} can't go on: its output folder belongs to the later job {newest}")


def check_free(connection: Connection, job: Row[Any]) -> None:
    """Raises RefusedError when another job of the folder is under way."""
    others = jobs.c.output == job.output, jobs.c.id != job.id, jobs.c.state.in_(_STARTED)
    other = connection.execute(select(jobs.c.id, jobs.c.state).where(*others).limit(1)).one_or_none()
    if other is not None:
        raise RefusedError(
            f"the output {job.output} belongs to job {other.id}, which is {other.state}:"
            f" wait for it or cancel it, or choose another output"
        )


def replace_jobs(
    connection: Connection, output: str, job_id: str, owner: Owner | None, now: float, lease_s: float
) -> None:
    """Cancels the other unfinished jobs of the folder, for `job_id`. Raises JobIsLive when one is worked on."""
    query = select(jobs).where(jobs.c.output == output, jobs.c.state.in_(_PENDING), jobs.c.id != job_id)
    for other in connection.execute(query.order_by(jobs.c.id).with_for_update(key_share=True)).all():
        check_holder(other, owner, now, lease_s)
        if other.runner == Runner.WORKERS:
            _check_workers(connection, other, now)
        message = f"its output folder was given to {job_id}"
        end_job(connection, other.id, JobState.CANCELLED, now, message, before=_PENDING)
        change_job(connection, other.id, {"owner": None})
        running = select(shards.c.id).where(shards.c.job_id == other.id, shards.c.state == ShardState.RUNNING)
        ended = attempts.c.shard_id.in_(running), attempts.c.outcome == AttemptOutcome.RUNNING
        connection.execute(update(attempts).where(*ended).values(outcome=AttemptOutcome.LOST, ended_at=now))
        unfinished = shards.c.job_id == other.id, shards.c.state.not_in(TERMINAL_SHARD_STATES)
        connection.execute(update(shards).where(*unfinished).values(off_hands(ShardState.CANCELLED)))
        add_event(connection, other.id, now, "replaced", {"by": job_id})


def _check_workers(connection: Connection, job: Row[Any], now: float) -> None:
    """Raises JobIsLive when a worker runs a shard of the job, plans it or finalizes it."""
    running = load_running(connection, [job.id])
    abandoned = find_abandoned(running, now)
    owners = [
        *(shard.owner for shard in running if shard not in abandoned),
        job.plan_owner if (job.plan_lease_until or 0.0) >= now else None,
        job.finalize_owner if (job.finalize_lease_until or 0.0) >= now else None,
    ]
    for owner in (Owner.from_text(text) for text in owners if text):
        if not is_dead(owner):
            raise JobIsLive(job.id, str(owner))
