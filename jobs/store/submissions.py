"""Jobs of the queue before their first shard: submitted once per idempotency key, planned by one worker.

The plan has a lease like a shard. It decides nothing: two planners only waste work, since one conditional
UPDATE starts the job. Large inputs are planned in pieces: plans.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, exists, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from gristmill.jobs.errors import RefusedError, StoreError
from gristmill.jobs.input.sources import Source
from gristmill.jobs.moments import parse_moment
from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.plan.cutting import Plan
from gristmill.jobs.records import PRIORITIES, JobRecord, Submitted
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.folder_rows import check_free, check_newest, replace_jobs
from gristmill.jobs.store.job_rows import (
    add_event,
    build_job,
    build_job_id,
    clean_text,
    end_job,
    enter_state,
    insert_shards,
    load_job,
    lock_job,
    lock_output,
    normal_output,
    plan_figures,
    plan_values,
    select_jobs,
)
from gristmill.jobs.store.models import events, jobs, plan_pieces
from gristmill.jobs.store.retries import RetryStore

if TYPE_CHECKING:
    from gristmill.jobs.spec import JobSpec

MAX_PLANNERS_LOST = 5

MAX_KEY_SIZE = 255
_TASK = re.compile(r"[\w.:-]+(@[\w.:-]+)?")  # as JobSpec.on_complete


class SubmitStore(RetryStore):
    """The submissions' part of Store."""

    def submit_job(self, spec: JobSpec, key: str | None = None) -> Submitted:
        """A job for the queue, to be planned; the one there is already when `key` was seen before.

        Times in the spec count from the database's clock. RefusedError for a key or a name that no database
        can hold.
        """
        for name, text in {"idempotency_key": key, "output": spec.output, "model": spec.model}.items():
            if text is not None and clean_text(text) != text:
                raise RefusedError(f"{name} is {text!r}: it holds a character that is no text; remove it")
        if key is not None and not 0 < len(key) <= MAX_KEY_SIZE:
            raise RefusedError(f"the idempotency key has {len(key)} characters: give 1 to {MAX_KEY_SIZE}")
        for name, text in {"quantization": spec.quantization, "kv_dtype": spec.kv_dtype}.items():
            if text != "auto":
                option = f"--{name.replace('_', '-')}"
                raise RefusedError(
                    f"{name} is {text!r}, which is a worker's choice: start workers with {option} {text}"
                )
        with self._write() as (connection, now):
            values = {
                "state": JobState.VALIDATING,
                "output": normal_output(spec.output),
                "model": spec.model,
                "spec": spec.model_dump(mode="json"),
                "max_tokens": spec.max_tokens,
                "dtype": spec.dtype,
                "priority": PRIORITIES.index(spec.priority),
                "not_before": parse_moment(spec.not_before, now) if spec.not_before else None,
                "deadline_at": parse_moment(spec.deadline, now) if spec.deadline else None,
                "on_complete": spec.on_complete,
            }
            return _insert_job(connection, values, key, now)

    def submit_refused(self, fields: Mapping[str, Any], key: str | None, message: str) -> JobRecord:
        """A failed job that says why an order from the queue can't be read; one per key, as for good ones."""
        texts = (fields.get(name) for name in ("output", "model", "on_complete"))
        output, model, task = (clean_text(text) if isinstance(text, str) else "" for text in texts)
        is_task = _TASK.fullmatch(task) is not None and len(task) <= MAX_KEY_SIZE
        with self._write() as (connection, now):
            values = {
                "state": JobState.FAILED,
                "message": clean_text(message),
                "output": normal_output(output) if output else "",
                "model": model,
                "spec": _as_json(fields),
                "on_complete": task if is_task else None,
                "finished_at": now,
                "notice_due_at": now if is_task else None,
            }
            return _insert_job(connection, values, clean_text(key)[:MAX_KEY_SIZE] if key else None, now).job

    def claim_plan(self, job_id: str, owner: Owner) -> JobRecord | None:
        """The right to plan a submitted job, for a lease; None when it is planned, or somebody is at it."""
        with self._write() as (connection, now):
            row = lock_job(connection, job_id)
            if row is None or row.state != JobState.VALIDATING or is_planning(row, now):
                return None
            if connection.scalar(select(exists().where(plan_pieces.c.job_id == job_id))):
                return None
            if row.plan_owner is not None and _is_deadly(connection, row, now):
                return None
            values = {"plan_owner": owner.to_text(), "plan_lease_until": now + self._lease_s}
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))
            return load_job(connection, job_id)

    def renew_plan(self, job_id: str, owner: Owner) -> bool:
        """Renews the lease of a long planning; False when the job was stopped or others plan it."""
        with self._write() as (connection, now):
            return self._change_plan(connection, job_id, owner, plan_lease_until=now + self._lease_s)

    def release_plan(self, job_id: str, owner: Owner) -> None:
        """Ends the right of `owner` to plan, so that the next try need not wait for the lease."""
        with self._write() as (connection, _):
            self._change_plan(connection, job_id, owner, plan_owner=None, plan_lease_until=None)

    def refuse_plan(self, job_id: str, message: str) -> bool:
        """Fails a job that can't be planned; False when it is past planning."""
        with self._write() as (connection, now):
            return end_job(connection, job_id, JobState.FAILED, now, message, before=[JobState.VALIDATING])

    def start_job(
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
        with self._write() as (connection, now):
            row = _lock_validating(connection, job_id)
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
        with self._write() as (connection, now):
            row = _lock_validating(connection, job_id)
            if row is None:
                raise RefusedError(f"job {job_id} was stopped before it was planned")
            check_newest(connection, row)
            replace_jobs(connection, row.output, job_id, None, now, self._lease_s)

    def output_jobs(self, output: str) -> list[JobRecord]:
        """All jobs of an output, newest first."""
        query = select_jobs().where(jobs.c.output == normal_output(output))
        with self._read() as (connection, _):
            rows = connection.execute(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc())).all()
        return [build_job(row) for row in rows]

    def _change_plan(self, connection: Connection, job_id: str, owner: Owner, **values: Any) -> bool:
        mine = jobs.c.state == JobState.VALIDATING, jobs.c.plan_owner == owner.to_text()
        change = update(jobs).where(jobs.c.id == job_id, *mine).values(values)
        return connection.execute(change).rowcount == 1


def _insert_job(connection: Connection, values: dict[str, Any], key: str | None, now: float) -> Submitted:
    """The new job, or that of the key: on PostgreSQL the INSERT waits for another one of the same key."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    job_id = build_job_id(now)
    common = {
        "id": job_id,
        "runner": Runner.WORKERS,
        "idempotency_key": key,
        "created_at": now,
        "num_rows": 0,
        "num_shards": 0,
        "fingerprint": "",
        **plan_values([], [], b"", ""),
    }
    statement = insert(jobs).values(common | values)
    added = statement.on_conflict_do_nothing(index_elements=[jobs.c.idempotency_key])
    if connection.scalar(added.returning(jobs.c.id)) is None:
        job_id = connection.scalar(select(jobs.c.id).where(jobs.c.idempotency_key == key)) or ""
        return Submitted(load_job(connection, job_id), False)
    add_event(connection, job_id, now, "submitted")
    return Submitted(load_job(connection, job_id), True)


def _as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as far as JSON can hold them; the rest as text."""
    text = json.dumps(dict(fields), default=str)
    return dict(json.loads(text, parse_constant=str))


def is_planning(row: Any, now: float) -> bool:
    """Whether somebody holds the plan: also another thread of the process that asks."""
    if row.plan_lease_until is None or row.plan_lease_until < now:
        return False
    return row.plan_owner is None or not is_dead(Owner.from_text(row.plan_owner))


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


def _lock_validating(connection: Connection, job_id: str) -> Row[Any] | None:
    """The row of a job that is to be planned, locked after its output folder."""
    output = connection.scalar(select(jobs.c.output).where(jobs.c.id == job_id))
    if output is None:
        raise StoreError(f"there is no job {job_id} in this database: `gristmill list` shows those there are")
    lock_output(connection, output)
    row = lock_job(connection, job_id)
    return row if row is not None and row.state == JobState.VALIDATING else None
