"""The end of a job in the database: claimed under a fence and a lease of its own, like a shard."""

from __future__ import annotations

from sqlalchemy import exists, select

from gristmill.jobs.owner import Owner
from gristmill.jobs.records import FinalizeClaim
from gristmill.jobs.states import TERMINAL_SHARD_STATES, JobState, ShardState
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import (
    belongs_to,
    change_job,
    credit_time,
    end_job,
    enter_state,
    is_held,
    lock_job,
)
from gristmill.jobs.store.models import jobs, shards
from gristmill.jobs.store.shard_rows import has_shards

OPEN_SHARD_STATES = tuple(state for state in ShardState if state not in TERMINAL_SHARD_STATES)


class Finalizing:
    """The right to finalize a job, and the end that it comes to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, job_id: str, owner: Owner) -> FinalizeClaim | None:
        """The right to finalize; None while shards are left, a live process is at it, or all is done."""
        with self._database.write() as (connection, now):
            row = lock_job(connection, job_id)
            if row is None or row.state not in (JobState.IN_PROGRESS, JobState.FINALIZING):
                return None
            fence = row.finalize_fence + 1
            values = {
                "finalize_fence": fence,
                "finalize_owner": owner.to_text(),
                "finalize_lease_until": now + self._database.lease_s,
            }
            if row.state == JobState.IN_PROGRESS:
                if has_shards(connection, job_id, OPEN_SHARD_STATES):
                    return None
                credit_time(connection, job_id, owner, now, self._database.lease_s)
                entered = enter_state(connection, job_id, JobState.FINALIZING, values | {"finished_at": now})
                return FinalizeClaim(job_id, fence, owner) if entered else None
            is_free = not is_held(row.finalize_owner, row.finalize_lease_until, now)
            if not is_free and row.finalize_owner != owner.to_text():
                return None
            change_job(connection, job_id, values)
            return FinalizeClaim(job_id, fence, owner)

    def renew(self, claim: FinalizeClaim) -> bool:
        """Renews the lease of a long finalization; False when another process took it over."""
        with self._database.write() as (connection, now):
            newest = jobs.c.state == JobState.FINALIZING, jobs.c.finalize_fence == claim.fence
            values = {"finalize_lease_until": now + self._database.lease_s}
            return change_job(connection, claim.job_id, values, *newest)

    def complete(self, claim: FinalizeClaim, state: JobState, message: str | None = None) -> bool:
        """Ends the job as completed or failed; False when the claim is not the newest."""
        assert state in (JobState.COMPLETED, JobState.FAILED), state
        newest = [jobs.c.finalize_fence == claim.fence]
        with self._database.write() as (connection, now):
            return end_job(
                connection, claim.job_id, state, now, message, before=[JobState.FINALIZING], where=newest
            )

    def waiting(self) -> list[str]:
        """Jobs of the queue whose shards are all at an end, and those whose finalizer died; oldest first."""
        left = exists().where(shards.c.job_id == jobs.c.id, shards.c.state.in_(OPEN_SHARD_STATES))
        columns = jobs.c.id, jobs.c.created_at, jobs.c.finalize_owner, jobs.c.finalize_lease_until
        query = select(*columns).where(belongs_to(None))
        with self._database.read() as (connection, now):
            ready = connection.execute(query.where(jobs.c.state == JobState.IN_PROGRESS, ~left)).all()
            ending = connection.execute(query.where(jobs.c.state == JobState.FINALIZING)).all()
        found = [
            *ready,
            *(row for row in ending if not is_held(row.finalize_owner, row.finalize_lease_until, now)),
        ]
        return [row.id for row in sorted(found, key=lambda row: (row.created_at, row.id))]
