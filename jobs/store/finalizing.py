"""The end of a job in the database: claimed under a fence and a lease of its own, like a shard."""

from __future__ import annotations

from sqlalchemy import select, update

from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.records import FinalizeClaim, FinishedShard
from gristmill.jobs.states import TERMINAL_SHARD_STATES, JobState, ShardState
from gristmill.jobs.store.claims import ClaimStore
from gristmill.jobs.store.job_rows import end_job, enter_state, lock_job
from gristmill.jobs.store.models import jobs, shards
from gristmill.jobs.store.shard_rows import build_part, build_range, has_shards

OPEN_SHARD_STATES = tuple(state for state in ShardState if state not in TERMINAL_SHARD_STATES)


class FinalizeStore(ClaimStore):
    """The finalizer's part of Store."""

    def claim_finalize(self, job_id: str, owner: Owner) -> FinalizeClaim | None:
        """The right to finalize; None while shards are left, a live process is at it, or all is done."""
        with self._write() as (connection, now):
            row = lock_job(connection, job_id)
            if row is None or row.state not in (JobState.IN_PROGRESS, JobState.FINALIZING):
                return None
            fence = row.finalize_fence + 1
            values = {
                "finalize_fence": fence,
                "finalize_owner": owner.to_text(),
                "finalize_lease_until": now + self._lease_s,
            }
            if row.state == JobState.IN_PROGRESS:
                if has_shards(connection, job_id, OPEN_SHARD_STATES):
                    return None
                self._credit_time(connection, job_id, owner, now)
                entered = enter_state(connection, job_id, JobState.FINALIZING, values | {"finished_at": now})
                return FinalizeClaim(job_id, fence, owner) if entered else None
            other = Owner.from_text(row.finalize_owner) if row.finalize_owner else owner
            if other != owner and not is_dead(other) and row.finalize_lease_until >= now:
                return None
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))
            return FinalizeClaim(job_id, fence, owner)

    def renew_finalize(self, claim: FinalizeClaim) -> bool:
        """Renews the lease of a long finalization; False when another process took it over."""
        with self._write() as (connection, now):
            newest = jobs.c.state == JobState.FINALIZING, jobs.c.finalize_fence == claim.fence
            change = update(jobs).where(jobs.c.id == claim.job_id, *newest)
            return connection.execute(change.values(finalize_lease_until=now + self._lease_s)).rowcount == 1

    def spooled_shards(self, job_id: str) -> list[FinishedShard]:
        """The shards whose rows lie in a spool, in its order."""
        query = select(shards).where(shards.c.job_id == job_id, shards.c.source_index < 0)
        with self._read() as (connection, _):
            rows = connection.execute(query.order_by(shards.c.shard_index)).all()
        return [FinishedShard(build_range(row), build_part(row), row.rows_failed) for row in rows]

    def complete_job(self, claim: FinalizeClaim, state: JobState, message: str | None = None) -> bool:
        """Ends the job as completed or failed; False when the claim is not the newest."""
        assert state in (JobState.COMPLETED, JobState.FAILED), state
        newest = [jobs.c.finalize_fence == claim.fence]
        with self._write() as (connection, now):
            return end_job(
                connection, claim.job_id, state, now, message, before=[JobState.FINALIZING], where=newest
            )

    def failed_shard_message(self, job_id: str) -> str | None:
        """Why the first failed shard failed; None when none did."""
        failed = select(shards.c.message).where(
            shards.c.job_id == job_id, shards.c.state == ShardState.FAILED
        )
        with self._read() as (connection, _):
            row = connection.execute(failed.order_by(shards.c.shard_index).limit(1)).one_or_none()
        return None if row is None else row.message or "a shard failed"
