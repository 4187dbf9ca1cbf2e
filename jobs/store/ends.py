"""What ends a job early, and what happens to a job that has ended: resumed, retried, in the end deleted.

A stop only says so (state cancelling, stopping_as what follows): whoever runs a shard hears it from its next
heartbeat and commits what is finished. The job ends once nobody runs a shard of it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, and_, case, delete, func, null, or_, select, update

from gristmill.jobs.errors import RefusedError, StoreError
from gristmill.jobs.records import CleanReport
from gristmill.jobs.states import RESUMABLE_JOB_STATES, TERMINAL_JOB_STATES, JobState, ShardState
from gristmill.jobs.stats import merge_stats
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.folder_rows import check_newest
from gristmill.jobs.store.job_rows import (
    AT_REST,
    add_event,
    add_job_stats,
    change_jobs,
    clean_text,
    end_job,
    enter_state,
    load_job,
    load_state,
    lock_job,
    lock_output,
)
from gristmill.jobs.store.models import attempts, events, jobs, plan_pieces, shards, workers
from gristmill.jobs.store.shard_rows import drop_shards, has_shards

_STOPPABLE = (JobState.VALIDATING, JobState.IN_PROGRESS)
_DELETE_SHARDS = 5000
_STOPPED = (ShardState.FAILED, ShardState.CANCELLED)


class Ends:
    """What ends a job early, and what may happen to it after its end."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def stop(self, job_id: str, state: JobState, message: str | None = None) -> bool:
        """Asks for the job to end as `state` (cancelled, expired, failed); False when it isn't under way."""
        with self._database.write() as (connection, now):
            return _stop(connection, job_id, state, message, now)

    def request_cancel(self, job_id: str) -> JobState:
        """Asks the job's workers to stop (their heartbeats hear of it); returns the job's state."""
        with self._database.write() as (connection, now):
            _stop(connection, job_id, JobState.CANCELLED, None, now)
            return load_state(connection, job_id)

    def finish_cancel(self, job_id: str) -> bool:
        """Ends a stopped job unless a live owner still works on it; True once it has ended."""
        with self._database.write() as (connection, now):
            _drain(connection, job_id, now)
            return load_state(connection, job_id) in RESUMABLE_JOB_STATES

    def drain_stopped(self) -> list[str]:
        """Cancels what nobody alive runs of the queue's stopped jobs; the ids of those that ended now."""
        return change_jobs(self._database, lambda _: [jobs.c.state == JobState.CANCELLING], _drain)

    def expire(self) -> list[str]:
        """Stops the queue's jobs whose deadline has passed; their ids."""
        late = lambda now: [jobs.c.state.in_(_STOPPABLE), jobs.c.deadline_at <= now]  # noqa: E731
        return change_jobs(self._database, late, _expire)

    def stop_if_too_many_errors(self, job_id: str, max_errors: int) -> bool:
        """Stops the job as failed when more than `max_errors` of its committed rows are errors.

        Error rows that a retry is about to take out do not count.
        """
        counted = shards.c.job_id == job_id, shards.c.strip_errors.is_(False)
        with self._database.read() as (connection, _):
            num_failed = connection.scalar(select(func.sum(shards.c.rows_failed)).where(*counted)) or 0
        if num_failed <= max_errors:
            return False
        message = f"{num_failed} rows failed, --max-errors is {max_errors}"
        return self.stop(job_id, JobState.FAILED, message)

    def resume(self, job_id: str) -> JobState:
        """Puts a failed, cancelled or expired job back in progress, its undone shards in the queue.

        One that was never planned is validated again. A deadline that has passed is lifted. Raises
        RefusedError when a later job took the output folder over.
        """
        with self._database.write() as (connection, now):
            job = _lock_ended(connection, job_id)
            if job.state not in RESUMABLE_JOB_STATES:
                return JobState(job.state)
            check_newest(connection, job)
            state = JobState.IN_PROGRESS if job.num_shards else JobState.VALIDATING
            _reopen(connection, job_id, state, now)
            connection.execute(delete(plan_pieces).where(plan_pieces.c.job_id == job_id))
            _requeue(connection, job_id, shards.c.state.in_(_STOPPED))
            add_event(connection, job_id, now, "resumed")
            return state

    def retry_failed(self, job_id: str) -> int:
        """Puts an ended job back in progress to compute its error rows again; how many there are.

        Undone shards come back too, as by resume. Whoever claims a shard with strip_errors first takes
        the error rows out of its part. Raises RefusedError when there is nothing to retry.
        """
        with self._database.write() as (connection, now):
            job = _lock_ended(connection, job_id)
            if job.state not in TERMINAL_JOB_STATES:
                raise RefusedError(f"job {job_id} is {job.state}: wait for its end, or cancel it, then retry")
            check_newest(connection, job)
            at_rest = shards.c.job_id == job_id, shards.c.state != ShardState.RUNNING
            bad = and_(*at_rest, shards.c.rows_failed > 0)
            num_failed = connection.scalar(select(func.sum(shards.c.rows_failed)).where(bad)) or 0
            if not num_failed:
                raise RefusedError(
                    f"job {job_id} has no failed rows to retry; undone rows run by: gristmill resume"
                )
            redone = and_(bad, shards.c.state == ShardState.DONE)
            stats = merge_stats(connection.scalars(select(shards.c.stats).where(redone)))
            add_job_stats(connection, job_id, stats.negated())  # they count again once they are done again
            connection.execute(update(shards).where(bad).values(strip_errors=True))
            _requeue(connection, job_id, or_(redone, shards.c.state.in_(_STOPPED)))
            _reopen(connection, job_id, JobState.IN_PROGRESS, now)
            add_event(connection, job_id, now, "retried", {"rows": int(num_failed)})
            return int(num_failed)

    def clean(self, older_than_s: float) -> CleanReport:
        """Deletes jobs that ended longer ago than that, and workers last seen before. No file is touched."""
        with self._database.read() as (connection, now):
            query = select(jobs.c.id).where(*_is_old(now - older_than_s)).order_by(jobs.c.created_at)
            job_ids = connection.scalars(query).all()
        deleted = tuple(job_id for job_id in job_ids if self._delete_job(job_id, older_than_s))
        with self._database.write() as (connection, now):
            gone = delete(workers).where(workers.c.seen_at < now - older_than_s)
            return CleanReport(deleted, connection.execute(gone).rowcount)

    def _delete_job(self, job_id: str, older_than_s: float) -> bool:
        """The history goes first, some shards at a time, so that nobody waits long; then the job as a whole."""
        last_id = 0
        while True:
            with self._database.write() as (connection, now):
                old = select(jobs.c.id).where(jobs.c.id == job_id, *_is_old(now - older_than_s))
                if connection.scalar(old.with_for_update(key_share=True)) is None:
                    return False
                rest = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.id > last_id)
                chunk = connection.scalars(rest.order_by(shards.c.id).limit(_DELETE_SHARDS)).all()
                if chunk:
                    last_id = chunk[-1]
                    some = attempts.c.shard_id.in_(rest.where(shards.c.id <= last_id))
                    connection.execute(delete(attempts).where(some))
                    continue
                for table in (shards, plan_pieces, events):
                    connection.execute(delete(table).where(table.c.job_id == job_id))
                connection.execute(delete(jobs).where(jobs.c.id == job_id))
                return True


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


def _expire(connection: Connection, job_id: str, now: float) -> bool:
    """Stops a job at its deadline; False when a resume has lifted that meanwhile."""
    row = lock_job(connection, job_id)
    if row is None or row.deadline_at is None or row.deadline_at > now:
        return False
    return _stop(connection, job_id, JobState.EXPIRED, "its deadline passed", now)


def _lock_ended(connection: Connection, job_id: str) -> Row[Any]:
    """The job's row, locked after its output folder. Raises StoreError when there is no such job."""
    lock_output(connection, load_job(connection, job_id).output)
    row = lock_job(connection, job_id)
    if row is None:
        raise StoreError(f"job {job_id} was deleted by `gristmill clean`")
    return row


def _reopen(connection: Connection, job_id: str, state: JobState, now: float) -> None:
    late = jobs.c.deadline_at <= now
    values = {
        **AT_REST,
        "message": None,
        "finished_at": None,
        "owner_seen_at": None,  # the pause is no active time
        "deadline_at": case((late, null()), else_=jobs.c.deadline_at),
    }
    entered = enter_state(connection, job_id, state, values, before=TERMINAL_JOB_STATES)
    assert entered, "the row is locked by this transaction"


def _requeue(connection: Connection, job_id: str, condition: Any) -> None:
    change = update(shards).where(shards.c.job_id == job_id, condition)
    connection.execute(change.values(state=ShardState.QUEUED, message=None, crash_count=0, finished_at=None))


def _is_old(before: float) -> list[Any]:
    return [
        jobs.c.state.in_(TERMINAL_JOB_STATES),
        func.coalesce(jobs.c.finished_at, jobs.c.created_at) < before,
    ]
