"""Jobs stopped before their end: cancelled, expired, or failed by too many errors.

A stop only says so (state cancelling, stopping_as what follows): whoever runs a shard hears it from its next
heartbeat and commits what is finished. The job ends once nobody runs a shard of it.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from gristmill.jobs.states import RESUMABLE_JOB_STATES, JobState, Runner, ShardState
from gristmill.jobs.store.finalizing import FinalizeStore
from gristmill.jobs.store.job_rows import add_event, clean_text, end_job, enter_state, load_state, lock_job
from gristmill.jobs.store.models import jobs, shards
from gristmill.jobs.store.shard_rows import drop_shards, has_shards

_STOPPABLE = (JobState.VALIDATING, JobState.IN_PROGRESS)


class StopStore(FinalizeStore):
    """The stops' part of Store."""

    def stop_job(self, job_id: str, state: JobState, message: str | None = None) -> bool:
        """Asks for the job to end as `state` (cancelled, expired, failed); False when it isn't under way."""
        with self._write() as (connection, now):
            return _stop(connection, job_id, state, message, now)

    def request_cancel(self, job_id: str) -> JobState:
        """Asks the job's workers to stop (their heartbeats hear of it); returns the job's state."""
        with self._write() as (connection, now):
            _stop(connection, job_id, JobState.CANCELLED, None, now)
            return load_state(connection, job_id)

    def finish_cancel(self, job_id: str) -> bool:
        """Ends a stopped job unless a live owner still works on it; True once it has ended."""
        with self._write() as (connection, now):
            _drain(connection, job_id, now)
            return load_state(connection, job_id) in RESUMABLE_JOB_STATES

    def drain_stopped(self) -> list[str]:
        """Cancels what nobody alive runs of the queue's stopped jobs; the ids of those that ended now."""
        with self._read() as (connection, _):
            stopped = jobs.c.state == JobState.CANCELLING, jobs.c.runner == Runner.WORKERS
            job_ids = connection.scalars(select(jobs.c.id).where(*stopped).order_by(jobs.c.id)).all()
        ended = []
        for job_id in job_ids:
            with self._write() as (connection, now):
                if _drain(connection, job_id, now):
                    ended.append(job_id)
        return ended

    def expire_jobs(self) -> list[str]:
        """Stops the queue's jobs whose deadline has passed; their ids."""
        with self._read() as (connection, now):
            late = jobs.c.state.in_(_STOPPABLE), jobs.c.runner == Runner.WORKERS, jobs.c.deadline_at <= now
            job_ids = connection.scalars(select(jobs.c.id).where(*late).order_by(jobs.c.id)).all()
        expired = []
        for job_id in job_ids:
            with self._write() as (connection, now):
                row = lock_job(connection, job_id)  # a resume may have lifted the deadline meanwhile
                if row is None or row.deadline_at is None or row.deadline_at > now:
                    continue
                if _stop(connection, job_id, JobState.EXPIRED, "its deadline passed", now):
                    expired.append(job_id)
        return expired

    def stop_if_too_many_errors(self, job_id: str, max_errors: int) -> bool:
        """Stops the job as failed when more than `max_errors` of its committed rows are errors.

        Error rows that a retry is about to take out do not count.
        """
        counted = shards.c.job_id == job_id, shards.c.strip_errors.is_(False)
        with self._read() as (connection, _):
            num_failed = connection.scalar(select(func.sum(shards.c.rows_failed)).where(*counted)) or 0
        if num_failed <= max_errors:
            return False
        message = f"{num_failed} rows failed, --max-errors is {max_errors}"
        return self.stop_job(job_id, JobState.FAILED, message)


def _stop(connection: Connection, job_id: str, state: JobState, message: str | None, now: float) -> bool:
    assert state in RESUMABLE_JOB_STATES, f"a job is not stopped as {state}"
    values = {"stopping_as": state, "message": None if message is None else clean_text(message)}
    if not enter_state(connection, job_id, JobState.CANCELLING, values):
        return False
    add_event(connection, job_id, now, "stop_requested", {"as": state.value})
    return True


def _drain(connection: Connection, job_id: str, now: float) -> bool:
    """Ends a stopped job of which no shard is run any more; False when one is, or it isn't stopped."""
    row = lock_job(connection, job_id)
    if row is None or row.state != JobState.CANCELLING:
        return False
    drop_shards(connection, job_id, now)
    if has_shards(connection, job_id, [ShardState.RUNNING]):
        return False
    return end_job(connection, job_id, JobState(row.stopping_as or JobState.CANCELLED), now)
