"""The plan of a submitted job: one worker at a time has the right to make it, and to start the job from it.

The plan has a lease like a shard. It decides nothing: two planners only waste work, since one conditional
UPDATE starts the job. Large inputs are planned in pieces: pieces.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, exists, func, select

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobRecord
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.states import JobState
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.folder_rows import check_free, check_newest, replace_jobs
from gristmill.jobs.store.job_rows import (
    add_event,
    change_job,
    end_job,
    enter_state,
    insert_shards,
    is_held,
    load_job,
    lock_output,
    lock_validating,
    plan_figures,
    plan_values,
)
from gristmill.jobs.store.models import events, jobs, plan_pieces
from gristmill.jobs.store.pieces import has_pieces, is_unplanned

MAX_PLANNERS_LOST = 5


class Plans:
    """The right to plan a submitted job, and to start it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, job_id: str, owner: Owner) -> JobRecord | None:
        """The right to plan a submitted job, for a lease; None when it is planned, or somebody is at it."""
        with self._database.write() as (connection, now):
            row = lock_validating(connection, job_id)
            if row is None or is_held(row.plan_owner, row.plan_lease_until, now):
                return None
            if has_pieces(connection, job_id):
                return None
            if row.plan_owner is not None and _is_deadly(connection, row, now):
                return None
            self._lease(connection, job_id, owner, now)
            return load_job(connection, job_id)

    def renew(self, job_id: str, owner: Owner) -> bool:
        """Renews the lease of a long planning; False when the job was stopped or others plan it."""
        with self._database.write() as (connection, now):
            until = now + self._database.lease_s
            return self._change_plan(
                connection, job_id, owner, plan_lease_until=until, owner_seen_at=_seen(now)
            )

    def release(self, job_id: str, owner: Owner) -> None:
        """Ends the right of `owner` to plan, so that the next try need not wait for the lease."""
        with self._database.write() as (connection, _):
            self._change_plan(connection, job_id, owner, plan_owner=None, plan_lease_until=None)

    def refuse(self, job_id: str, message: str) -> bool:
        """Fails a job that can't be planned; False when it is past planning."""
        with self._database.write() as (connection, now):
            return end_job(connection, job_id, JobState.FAILED, now, message, before=[JobState.VALIDATING])

    def start(  # noqa: PLR0913
        self,
        job_id: str,
        sources: Sequence[Source],
        columns: Sequence[str],
        plan: Plan,
        part_schema: bytes,
        identity: str,
        prefix_key: str | None = None,
        regrouped: Mapping[str, Any] | None = None,
    ) -> bool:
        """Puts a planned job in progress with all its shards queued; False when it is not to be planned.

        `regrouped`: what the job's history tells of a regrouping.

        Raises RefusedError when another job is at work in its output folder.
        """
        with self._database.write() as (connection, now):
            row = _lock_output_and_job(connection, job_id)
            if row is None:
                return False
            check_free(connection, row)
            values = {
                **plan_values(sources, columns, part_schema, identity),
                "prefix_key": prefix_key,
                "num_rows": plan.num_rows,
                "num_shards": len(plan.shards),
                "plan_owner": None,
                "plan_lease_until": None,
                "owner_seen_at": _seen(now),
            }
            entered = enter_state(connection, job_id, JobState.IN_PROGRESS, values)
            assert entered, "the row is locked by this transaction"
            insert_shards(connection, job_id, plan.shards)
            connection.execute(plan_pieces.delete().where(plan_pieces.c.job_id == job_id))
            add_event(connection, job_id, now, "planned", plan_figures(plan, regrouped))
            return True

    def take_over_output(self, job_id: str) -> None:
        """Cancels the earlier unfinished jobs of the job's output, which is about to be overwritten.

        Raises JobIsLive while somebody works on one of them, RefusedError when a later job has the folder or
        this one was stopped.
        """
        with self._database.write() as (connection, now):
            row = _lock_output_and_job(connection, job_id)
            if row is None:
                raise RefusedError(f"job {job_id} was stopped before it was planned")
            check_newest(connection, row)
            replace_jobs(connection, row.output, job_id, None, now, self._database.lease_s)

    def _change_plan(self, connection: Connection, job_id: str, owner: Owner, **values: Any) -> bool:
        mine = jobs.c.state == JobState.VALIDATING, jobs.c.plan_owner == owner.to_text()
        return change_job(connection, job_id, values, *mine)

    def _lease(self, connection: Connection, job_id: str, owner: Owner, now: float) -> None:
        values = {"plan_owner": owner.to_text(), "plan_lease_until": now + self._database.lease_s}
        change_job(connection, job_id, values)

    def claim_start(self, job_id: str, owner: Owner) -> bool:
        """The right to start a job whose pieces are all planned, for a lease that renew renews.

        False when it is started, or somebody is at it: also another thread of the process that asks.
        """
        with self._database.write() as (connection, now):
            row = lock_validating(connection, job_id)
            if row is None:
                return False
            if row.plan_owner is not None and is_held(row.plan_owner, row.plan_lease_until, now):
                return False
            self._lease(connection, job_id, owner, now)
            return True

    def waiting(self) -> list[str]:
        """Submitted jobs that nobody plans, oldest first; those that wait for pieces are not among them."""
        waiting = exists().where(plan_pieces.c.job_id == jobs.c.id)
        with self._database.read() as (connection, now):
            columns = jobs.c.id, jobs.c.plan_owner, jobs.c.plan_lease_until
            query = select(*columns).where(*is_unplanned(), ~waiting)
            rows = connection.execute(query.order_by(jobs.c.created_at, jobs.c.id)).all()
        return [row.id for row in rows if not is_held(row.plan_owner, row.plan_lease_until, now)]


def _seen(now: float) -> ColumnElement[Any]:
    """The run that holds the job is at it; planning is no active time."""
    return case((jobs.c.owner.is_not(None), now), else_=None)


def _is_deadly(connection: Connection, job: Row[Any], now: float) -> bool:
    """Counts a planner that was lost with the plan unfinished; after MAX_PLANNERS_LOST the job fails.

    A damaged file can end the process that opens it: without a limit, worker after worker.
    """
    lost = events.c.job_id == job.id, events.c.kind == "planner_lost"
    add_event(connection, job.id, now, "planner_lost", {"owner": job.plan_owner})
    if int(connection.scalar(select(func.count()).where(*lost)) or 0) < MAX_PLANNERS_LOST:
        return False
    message = f"{MAX_PLANNERS_LOST} workers ended while they planned it: look for a damaged input file"
    return end_job(connection, job.id, JobState.FAILED, now, message, before=[JobState.VALIDATING])


def _lock_output_and_job(connection: Connection, job_id: str) -> Row[Any] | None:
    """The row of a job that is to be planned, locked after its output folder."""
    lock_output(connection, load_job(connection, job_id).output)
    return lock_validating(connection, job_id)
