"""Rows of the jobs table: the conditional UPDATE of the state, and the way to JobRecord."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, Select, func, insert, select, update

from jobs.errors import StoreError
from jobs.models import events, jobs, shards
from jobs.owner import Owner
from jobs.planning import Plan
from jobs.records import JobRecord
from jobs.sources import Source
from jobs.states import JOB_STATES_BEFORE, JobState, ShardState

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: sorts as it counts, and reads aloud


def build_job_id(now: float) -> str:
    """`job_` and 26 characters: the time in ms, then 80 random bits, so that ids sort by creation."""
    number = int(now * 1000) << 80 | secrets.randbits(80)
    return "job_" + "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def select_jobs() -> Select[Any]:
    """All columns of jobs, and rows_committed."""
    committed = (
        select(func.coalesce(func.sum(shards.c.part_rows), 0))
        .where(shards.c.job_id == jobs.c.id)
        .scalar_subquery()
    )
    return select(jobs, committed.label("rows_committed"))


def load_job(connection: Connection, job_id: str) -> JobRecord:
    """The job of that id. Raises StoreError when there is none."""
    row = connection.execute(select_jobs().where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise StoreError(f"there is no job {job_id} in this database: `gristmill list` shows those there are")
    return build_job(row)


def build_job(row: Row[Any]) -> JobRecord:
    """A row of select_jobs() as a value."""
    return JobRecord(
        job_id=row.id,
        state=JobState(row.state),
        message=row.message,
        identity=row.identity,
        fingerprint=row.fingerprint,
        model=row.model,
        output=row.output,
        spec=row.spec,
        sources=tuple(Source(**source) for source in row.sources),
        part_schema=bytes(row.part_schema),
        num_rows=row.num_rows,
        num_shards=row.num_shards,
        rows_committed=int(row.rows_committed),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        owner=Owner.from_text(row.owner) if row.owner else None,
        owner_seen_at=row.owner_seen_at,
    )


def insert_shards(connection: Connection, job_id: str, plan: Plan) -> None:
    """One queued shard for each range of the plan."""
    rows = [{"job_id": job_id, "state": ShardState.QUEUED, **asdict(shard)} for shard in plan.shards]
    connection.execute(insert(shards), rows)


def enter_state(
    connection: Connection, job_id: str, state: JobState, values: Mapping[str, Any] | None = None
) -> bool:
    """The conditional UPDATE into `state`; False when the job is in no state that may precede it."""
    before = JOB_STATES_BEFORE[state]
    change = (
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.state.in_(before))
        .values(state=state, **(values or {}))
    )
    return connection.execute(change).rowcount == 1


def add_event(
    connection: Connection, job_id: str, now: float, kind: str, detail: Mapping[str, Any] | None = None
) -> None:
    """One line in the job's history."""
    connection.execute(insert(events).values(job_id=job_id, at=now, kind=kind, detail=dict(detail or {})))
