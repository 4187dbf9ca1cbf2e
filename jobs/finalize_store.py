"""The end of a job in the database: claimed under a fence and a lease of its own, like a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, select, update

from jobs.job_rows import add_event, enter_state
from jobs.models import jobs, shards
from jobs.owner import Owner, is_dead
from jobs.records import FinalizeClaim
from jobs.shard_rows import has_shards
from jobs.shard_store import ShardStore
from jobs.states import TERMINAL_SHARD_STATES, JobState, ShardState

NOT_FINALIZING: Mapping[str, None] = {"finalize_owner": None, "finalize_lease_until": None}


class FinalizeStore(ShardStore):
    """The finalizer's part of Store."""

    def claim_finalize(self, job_id: str, owner: Owner) -> FinalizeClaim | None:
        """The right to finalize; None while shards are left, a live process is at it, or all is done."""
        with self._write() as (connection, now):
            row = connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one_or_none()
            if row is None or row.state not in (JobState.IN_PROGRESS, JobState.FINALIZING):
                return None
            fence = row.finalize_fence + 1
            values = {
                "finalize_fence": fence,
                "finalize_owner": owner.to_text(),
                "finalize_lease_until": now + self._lease_s,
            }
            if row.state == JobState.IN_PROGRESS:
                left = [state for state in ShardState if state not in TERMINAL_SHARD_STATES]
                if has_shards(connection, job_id, left):
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
            return self._change_finalizing(connection, claim, {"finalize_lease_until": now + self._lease_s})

    def complete_job(self, claim: FinalizeClaim, state: JobState, message: str | None = None) -> bool:
        """Ends the job as completed or failed; False when the claim is not the newest."""
        assert state in (JobState.COMPLETED, JobState.FAILED), state
        with self._write() as (connection, now):
            values = {"state": state, "message": message, **NOT_FINALIZING}
            if not self._change_finalizing(connection, claim, values):
                return False
            add_event(connection, claim.job_id, now, state.value, {"message": message} if message else None)
            return True

    def failed_shard_message(self, job_id: str) -> str | None:
        """Why the first failed shard failed; None when none did."""
        failed = select(shards.c.message).where(
            shards.c.job_id == job_id, shards.c.state == ShardState.FAILED
        )
        with self._read() as (connection, _):
            row = connection.execute(failed.order_by(shards.c.shard_index).limit(1)).one_or_none()
        return None if row is None else row.message or "a shard failed"

    def _change_finalizing(
        self, connection: Connection, claim: FinalizeClaim, values: Mapping[str, Any]
    ) -> bool:
        change = update(jobs).where(
            jobs.c.id == claim.job_id,
            jobs.c.state == JobState.FINALIZING,
            jobs.c.finalize_fence == claim.fence,
        )
        return connection.execute(change.values(values)).rowcount == 1
