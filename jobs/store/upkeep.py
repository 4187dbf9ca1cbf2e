"""What the reconciler asks: which jobs wait to be finalized, and which submitters wait to hear of an end."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, exists, func, select, update

from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.records import Notice
from gristmill.jobs.states import TERMINAL_JOB_STATES, JobState, Runner
from gristmill.jobs.store.finalizing import OPEN_SHARD_STATES
from gristmill.jobs.store.models import jobs, shards
from gristmill.jobs.store.plans import PlanStore

CALLBACK_QUEUE = "gristmill.callbacks"
NOTICE_DELAYS_S = (15.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)  # between a notice and the next one


class UpkeepStore(PlanStore):
    """The reconciler's part of Store."""

    def jobs_to_finalize(self) -> list[str]:
        """Jobs of the queue whose shards are all at an end, and those whose finalizer died; oldest first."""
        left = exists().where(shards.c.job_id == jobs.c.id, shards.c.state.in_(OPEN_SHARD_STATES))
        columns = jobs.c.id, jobs.c.created_at, jobs.c.finalize_owner, jobs.c.finalize_lease_until
        query = select(*columns).where(jobs.c.runner == Runner.WORKERS)
        with self._read() as (connection, now):
            ready = connection.execute(query.where(jobs.c.state == JobState.IN_PROGRESS, ~left)).all()
            ending = connection.execute(query.where(jobs.c.state == JobState.FINALIZING)).all()
        found = [*ready, *(row for row in ending if not _is_finalizing(row, now))]
        return [row.id for row in sorted(found, key=lambda row: (row.created_at, row.id))]

    def due_notices(self) -> list[Notice]:
        """The notices to send now; notice_sent says who of several senders sends one."""
        query = select(jobs).where(jobs.c.state.in_(TERMINAL_JOB_STATES)).order_by(jobs.c.notice_due_at)
        with self._read() as (connection, now):
            due = connection.execute(query.where(jobs.c.notice_due_at <= now)).all()
            return [_build_notice(row, connection.execute(_select_sums(row.id)).one()) for row in due]

    def notice_sent(self, job_id: str, number: int) -> bool:
        """Notes that notice `number` is sent and sets the time of the next one; False when others did.

        Call it before sending: one of several senders gets True. A sender that dies then is made up for by
        the next notice.
        """
        delay = NOTICE_DELAYS_S[number - 1] if number <= len(NOTICE_DELAYS_S) else None
        with self._write() as (connection, now):
            due = jobs.c.notices_sent == number - 1, jobs.c.notice_due_at.is_not(None)
            values = {"notices_sent": number, "notice_due_at": None if delay is None else now + delay}
            change = update(jobs).where(jobs.c.id == job_id, *due)
            return connection.execute(change.values(values)).rowcount == 1

    def acknowledge(self, job_id: str) -> bool:
        """Ends the notices of a job: its submitter knows. False when none was to come."""
        with self._write() as (connection, _):
            change = update(jobs).where(jobs.c.id == job_id, jobs.c.notice_due_at.is_not(None))
            return connection.execute(change.values(notice_due_at=None)).rowcount == 1


def _is_finalizing(row: Any, now: float) -> bool:
    if row.finalize_lease_until is None or row.finalize_lease_until < now:
        return False
    return not is_dead(Owner.from_text(row.finalize_owner))


def _select_sums(job_id: str) -> Any:
    columns = shards.c.rows_completed, shards.c.rows_failed, shards.c.rows_skipped
    sums = [func.coalesce(func.sum(column), 0).label(column.name) for column in columns]
    return select(*sums).where(shards.c.job_id == job_id)


def _build_notice(row: Row[Any], sums: Row[Any]) -> Notice:
    task, _, queue = row.on_complete.partition("@")
    completed, failed, skipped = int(sums.rows_completed), int(sums.rows_failed), int(sums.rows_skipped)
    payload = {
        "job_id": row.id,
        "state": row.state,
        "message": row.message,
        "output": row.output,
        "rows": row.num_rows,
        "completed": completed,
        "failed": failed,
        "skipped": skipped,
        "not_run": row.num_rows - completed - failed - skipped,
        "idempotency_key": row.idempotency_key,
    }
    return Notice(row.id, task, queue or CALLBACK_QUEUE, row.notices_sent + 1, payload)
