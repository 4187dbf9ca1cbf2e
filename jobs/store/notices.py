"""The notices that tell a submitter how its job ended: which are due, sent, acknowledged."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select

from gristmill.jobs.records import Notice
from gristmill.jobs.states import TERMINAL_JOB_STATES
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import change_job
from gristmill.jobs.store.models import job_progress, jobs

CALLBACK_QUEUE = "gristmill.callbacks"  # of on_complete tasks that name no queue
NOTICE_DELAYS_S = (15.0, 60.0, 300.0, 1800.0, 7200.0, 43200.0)  # between a notice and the next one
_FIGURES = ("rows", "completed", "failed", "skipped", "not_run")


class Notices:
    """The notices that are due, sent and acknowledged."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def due(self) -> list[Notice]:
        """The notices to send now; mark_sent says who of several senders sends one."""
        figures = [job_progress.c[name] for name in _FIGURES]
        query = select(jobs, *figures).join(job_progress, job_progress.c.job_id == jobs.c.id)
        with self._database.read() as (connection, now):
            ended = jobs.c.state.in_(TERMINAL_JOB_STATES), jobs.c.notice_due_at <= now
            due = connection.execute(query.where(*ended).order_by(jobs.c.notice_due_at)).all()
        return [_build_notice(row) for row in due]

    def mark_sent(self, job_id: str, number: int) -> bool:
        """Notes that notice `number` is sent and sets the time of the next one; False when others did.

        Call it before sending: one of several senders gets True. A sender that dies then is made up for by
        the next notice.
        """
        delay = NOTICE_DELAYS_S[number - 1] if number <= len(NOTICE_DELAYS_S) else None
        with self._database.write() as (connection, now):
            due = jobs.c.notices_sent == number - 1, jobs.c.notice_due_at.is_not(None)
            values = {"notices_sent": number, "notice_due_at": None if delay is None else now + delay}
            return change_job(connection, job_id, values, *due)

    def acknowledge(self, job_id: str) -> bool:
        """Ends the notices of a job: its submitter knows. False when none was to come."""
        with self._database.write() as (connection, _):
            return change_job(connection, job_id, {"notice_due_at": None}, jobs.c.notice_due_at.is_not(None))


def _build_notice(row: Row[Any]) -> Notice:
    task, _, queue = row.on_complete.partition("@")
    payload = {
        "job_id": row.id,
        "state": row.state,
        "message": row.message,
        "output": row.output,
        **{name: row._mapping[name] for name in _FIGURES},
        "idempotency_key": row.idempotency_key,
    }
    return Notice(row.id, task, queue or CALLBACK_QUEUE, row.notices_sent + 1, payload)
