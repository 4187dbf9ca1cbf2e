"""Rows of the jobs table: the lock, the conditional UPDATE of the state, and the way to JobRecord.

Locks are taken in one order everywhere, or two transactions would wait for each other: output folder, jobs by
id, shards by id.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, case, func, insert, or_, select, update

from gristmill.jobs.errors import StoreError
from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.records import PRIORITIES, JobRecord, Signal
from gristmill.jobs.source import Plan, ShardRange, Source
from gristmill.jobs.states import JOB_STATES_BEFORE, TERMINAL_JOB_STATES, JobState, Runner, ShardState
from gristmill.jobs.stats import JobStats
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.models import events, jobs, shards

# Of a job that nobody plans, stops or finalizes, and that owes nobody a notice.
AT_REST: Mapping[str, Any] = {
    "stopping_as": None,
    "plan_owner": None,
    "plan_lease_until": None,
    "finalize_owner": None,
    "finalize_lease_until": None,
    "notices_sent": 0,
    "notice_due_at": None,
}
# Of a JobRecord, those that are as its columns hold them.
_PLAIN_FIELDS = (
    *("message", "identity", "fingerprint", "model", "output", "spec", "num_rows", "num_shards"),
    *("created_at", "started_at", "finished_at", "owner_seen_at", "dtype", "prefix_key", "idempotency_key"),
    *("not_before", "deadline_at", "on_complete"),
)
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: sorts as it counts, and reads aloud
_INSERT_ROWS = 2000


def build_job_id(now: float) -> str:
    """`job_` and 26 characters: the time in ms, then 80 random bits, so that ids sort by creation."""
    number = int(now * 1000) << 80 | secrets.randbits(80)
    return "job_" + "".join(_DIGITS[number >> shift & 31] for shift in range(125, -1, -5))


def normal_output(output: str) -> str:
    """One spelling for one output place: an absolute path, or a URL without a slash at its end."""
    return output.rstrip("/") if "://" in output else os.path.abspath(output)


def clean_text(text: str) -> str:
    """Text that every database takes: without NUL and half surrogates, which error messages can quote."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


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
        raise _no_job(job_id)
    return build_job(row)


def load_state(connection: Connection, job_id: str) -> JobState:
    """The job's state. Raises StoreError when there is no such job."""
    state = connection.scalar(select(jobs.c.state).where(jobs.c.id == job_id))
    if state is None:
        raise _no_job(job_id)
    return JobState(state)


def change_job(
    connection: Connection, job_id: str, values: Mapping[str, Any], *where: ColumnElement[bool]
) -> bool:
    """The UPDATE of one job's row; False when it isn't, or is no longer, as `where` says."""
    change = update(jobs).where(jobs.c.id == job_id, *where).values(**values)
    return connection.execute(change).rowcount == 1


def belongs_to(owner: Owner | None) -> ColumnElement[bool]:
    """The condition for a job of the process `owner` alone (a `gristmill run`); None: of the queue's workers."""
    return jobs.c.runner == Runner.WORKERS if owner is None else jobs.c.owner == owner.to_text()


def change_jobs(
    database: Database,
    where: Callable[[float], Sequence[ColumnElement[bool]]],
    change: Callable[[Connection, str, float], bool],
) -> list[str]:
    """The ids of the queue's jobs that `where` finds now and `change` changed, in a transaction each."""
    with database.read() as (connection, now):
        found = select(jobs.c.id).where(belongs_to(None), *where(now))
        job_ids = connection.scalars(found.order_by(jobs.c.id)).all()
    changed = []
    for job_id in job_ids:
        with database.write() as (connection, now):
            if change(connection, job_id, now):
                changed.append(job_id)
    return changed


def lock_job(connection: Connection, job_id: str) -> Row[Any] | None:
    """The job's row as it is now, which no other transaction changes before this one ends."""
    query = select(jobs).where(jobs.c.id == job_id).with_for_update(key_share=True)
    return connection.execute(query).one_or_none()


def lock_validating(connection: Connection, job_id: str) -> Row[Any] | None:
    """The row of a job that is to be planned, locked; None for any other."""
    row = lock_job(connection, job_id)
    return row if row is not None and row.state == JobState.VALIDATING else None


def lock_output(connection: Connection, output: str) -> None:
    """Lets one transaction at a time decide which job has the output folder."""
    if connection.dialect.name == "postgresql":  # on SQLite every writer is alone anyway
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(output, 0))))


def build_job(row: Row[Any]) -> JobRecord:
    """A row of select_jobs() as a value."""
    as_they_are = {name: row._mapping[name] for name in _PLAIN_FIELDS}
    return JobRecord(
        **as_they_are,
        job_id=row.id,
        state=JobState(row.state),
        sources=tuple(Source(**source) for source in row.sources),
        part_schema=bytes(row.part_schema),
        rows_committed=int(row.rows_committed),
        owner=Owner.from_text(row.owner) if row.owner else None,
        runner=Runner(row.runner),
        columns=tuple(row.columns),
        priority=PRIORITIES[row.priority],
        stopping_as=JobState(row.stopping_as) if row.stopping_as else None,
    )


def plan_values(
    sources: Sequence[Source], columns: Sequence[str], part_schema: bytes, identity: str
) -> dict[str, Any]:
    """Columns of a job that planning finds out, before the shards."""
    return {
        "sources": [asdict(source) for source in sources],
        "columns": list(columns),
        "part_schema": part_schema,
        "identity": identity,
    }


def plan_figures(plan: Plan, regrouped: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the job's history tells of its plan."""
    figures: dict[str, Any] = {"rows": plan.num_rows, "shards": len(plan.shards)}
    return figures if regrouped is None else figures | {"regrouped": dict(regrouped)}


def insert_shards(connection: Connection, job_id: str, ranges: Iterable[ShardRange]) -> None:
    """One queued shard for each range; a chunk at a time, since a job may have 100,000."""
    rows = ({"job_id": job_id, "state": ShardState.QUEUED, **asdict(shard)} for shard in ranges)
    while chunk := list(islice(rows, _INSERT_ROWS)):
        connection.execute(insert(shards), chunk)


def enter_state(
    connection: Connection,
    job_id: str,
    state: JobState,
    values: Mapping[str, Any] | None = None,
    before: Collection[JobState] | None = None,
) -> bool:
    """The conditional UPDATE into `state`; False when the job is in no state that may precede it."""
    assert state not in TERMINAL_JOB_STATES, f"{state} is an end: end_job tells the submitter"
    values = {"state": state, **(values or {})}
    return change_job(connection, job_id, values, _may_precede(state, before))


def end_job(
    connection: Connection,
    job_id: str,
    state: JobState,
    now: float,
    message: str | None = None,
    before: Collection[JobState] | None = None,
    where: Sequence[ColumnElement[bool]] = (),
) -> bool:
    """The conditional UPDATE into a terminal state; where the submitter asked for a notice, it is due now.

    `message` None keeps the one there is.
    """
    assert state in TERMINAL_JOB_STATES, f"{state} is no end"
    values: dict[str, Any] = {
        **AT_REST,
        "state": state,
        "finished_at": func.coalesce(jobs.c.finished_at, now),
        "notice_due_at": case((jobs.c.on_complete.is_not(None), now), else_=None),
    }
    if message is not None:
        values["message"] = clean_text(message)
    if not change_job(connection, job_id, values, _may_precede(state, before), *where):
        return False
    add_event(connection, job_id, now, state.value, {"message": values["message"]} if message else None)
    return True


def add_job_stats(connection: Connection, job_id: str, stats: JobStats) -> None:
    """Adds a shard's stats to the sum over the done shards, so that a status need not read a thousand of them.

    The percentiles go into columns of their own, for people who write SQL.
    """
    query = select(jobs.c.stats).where(jobs.c.id == job_id).with_for_update(key_share=True)
    total = JobStats.from_json(connection.scalar(query))
    total.merge(stats)
    percentiles = {
        f"{measure}_{label}": value
        for measure, values in total.percentiles().items()
        for label, value in values.items()
    }
    change_job(connection, job_id, {"stats": total.to_json(), **percentiles})


def is_held(owner: str | None, lease_until: float | None, now: float) -> bool:
    """Whether a process that is not known to be dead has the plan or the end of a job: also the one that asks."""
    if lease_until is None or lease_until < now:
        return False
    return owner is None or not is_dead(Owner.from_text(owner))


def touch_job(connection: Connection, job_id: str, owner: Owner, now: float, lease_s: float) -> Signal:
    """Says that `owner` works on the job, and hears whether to go on."""
    credit_time(connection, job_id, owner, now, lease_s)
    state = connection.scalar(select(jobs.c.state).where(jobs.c.id == job_id))
    return Signal.CONTINUE if state == JobState.IN_PROGRESS else Signal.CANCEL


def credit_time(connection: Connection, job_id: str, owner: Owner, now: float, lease_s: float) -> None:
    """Adds the time since anybody last said so to the job's active time, and says so now.

    A local job hears its holder only; at a job of the queue several workers work at once, and the time
    passes once.
    """
    is_working = jobs.c.state.in_((JobState.IN_PROGRESS, JobState.CANCELLING))
    passed = now - func.coalesce(jobs.c.owner_seen_at, now)
    credit = case((or_(~is_working, passed < 0), 0.0), (passed > lease_s, lease_s), else_=passed)
    works = or_(belongs_to(owner), and_(belongs_to(None), is_working))
    seen_at = case((jobs.c.owner_seen_at > now, jobs.c.owner_seen_at), else_=now)
    values = {"active_s": jobs.c.active_s + credit, "owner_seen_at": seen_at, "lease_s": lease_s}
    change_job(connection, job_id, values, works)


def add_event(
    connection: Connection, job_id: str, now: float, kind: str, detail: Mapping[str, Any] | None = None
) -> None:
    """One line in the job's history."""
    connection.execute(insert(events).values(job_id=job_id, at=now, kind=kind, detail=dict(detail or {})))


def _may_precede(state: JobState, before: Collection[JobState] | None) -> ColumnElement[bool]:
    return jobs.c.state.in_(JOB_STATES_BEFORE[state] if before is None else before)


def _no_job(job_id: str) -> StoreError:
    return StoreError(f"there is no job {job_id} in this database: `gristmill list` shows those there are")
