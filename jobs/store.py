"""Jobs in the database: created, held, cancelled, resumed. Shards are in shard_store.py, the end in
finalize_store.py, the numbers in status.py.

Every change of a state is a conditional UPDATE, so two callers never both believe that they made it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Connection, insert, select, update

from jobs.database import connect_database
from jobs.errors import JobIsLive, RefusedError
from jobs.finalize_store import NOT_FINALIZING, FinalizeStore
from jobs.job_rows import (
    add_event,
    build_job,
    build_job_id,
    enter_state,
    insert_shards,
    load_job,
    select_jobs,
)
from jobs.models import attempts, jobs, shards
from jobs.owner import Owner, is_alive, is_local
from jobs.planning import Plan
from jobs.records import JobRecord, JobStatus
from jobs.shard_rows import has_shards
from jobs.shard_store import LEASE_S
from jobs.sources import Source
from jobs.states import RESUMABLE_JOB_STATES, TERMINAL_SHARD_STATES, AttemptOutcome, JobState, ShardState
from jobs.status import load_learned_rows_per_s, load_status

if TYPE_CHECKING:
    import pyarrow as pa

    from jobs.spec import JobSpec

_PENDING = (JobState.VALIDATING, JobState.IN_PROGRESS, JobState.FINALIZING, JobState.CANCELLING)


def open_store(url: str, clock: Callable[[], float] | None = None, lease_s: float = LEASE_S) -> Store:
    """The store of a database, its schema migrated; `clock` replaces the database's time in tests."""
    return Store(connect_database(url), clock, lease_s)


class Store(FinalizeStore):
    """All that is asked of the job database. Safe for several threads; close it at the end."""

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_job(
        self,
        spec: JobSpec,
        sources: Sequence[Source],
        plan: Plan,
        fingerprint: str,
        identity: str,
        part_schema: pa.Schema,
        owner: Owner | None = None,
    ) -> JobRecord:
        """A job in progress with all its shards queued, held by `owner` from the start.

        It takes its output folder over: an unfinished earlier job of it is cancelled. Raises JobIsLive
        when a live process holds that job.
        """
        output = os.path.abspath(spec.output)
        with self._write() as (connection, now):
            job_id = build_job_id(now)
            self._replace_jobs(connection, output, job_id, owner, now)
            connection.execute(
                insert(jobs).values(
                    id=job_id,
                    state=JobState.IN_PROGRESS,
                    identity=identity,
                    fingerprint=fingerprint,
                    model=spec.model,
                    output=output,
                    spec=spec.model_dump(mode="json"),
                    sources=[asdict(source) for source in sources],
                    part_schema=part_schema.serialize().to_pybytes(),
                    max_tokens=spec.max_tokens,
                    num_rows=plan.num_rows,
                    num_shards=len(plan.shards),
                    created_at=now,
                    owner=owner.to_text() if owner else None,
                    owner_seen_at=now if owner else None,
                )
            )
            insert_shards(connection, job_id, plan)
            add_event(connection, job_id, now, "created", {"rows": plan.num_rows, "shards": len(plan.shards)})
            return load_job(connection, job_id)

    def find_job(self, ref: str) -> JobRecord | None:
        """The job that `ref` names: an id, an output folder (its newest job), or the beginning of an id."""
        newest = select_jobs().order_by(jobs.c.created_at.desc(), jobs.c.id.desc())
        with self._read() as (connection, _):
            for condition in (jobs.c.id == ref, jobs.c.output == os.path.abspath(ref)):
                row = connection.execute(newest.where(condition).limit(1)).one_or_none()
                if row is not None:
                    return build_job(row)
            rows = connection.execute(newest.where(jobs.c.id.startswith(ref, autoescape=True)).limit(2)).all()
        if len(rows) > 1:
            raise RefusedError(
                f"{ref} is the beginning of several job ids: give more of it (`gristmill list`)"
            )
        return build_job(rows[0]) if rows and ref else None

    def load_job(self, job_id: str) -> JobRecord:
        """The job as it is now. Raises StoreError when there is none of that id."""
        with self._read() as (connection, _):
            return load_job(connection, job_id)

    def list_jobs(self, limit: int = 50) -> list[JobRecord]:
        """The newest jobs, newest first."""
        query = select_jobs().order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
        with self._read() as (connection, _):
            return [build_job(row) for row in connection.execute(query)]

    def hold_job(self, job_id: str, owner: Owner) -> None:
        """Makes `owner` the one process that runs the job. Raises JobIsLive while another one does."""
        with self._write() as (connection, now):
            self._check_not_live(load_job(connection, job_id), owner, now)
            change = update(jobs).where(jobs.c.id == job_id).values(owner=owner.to_text(), owner_seen_at=now)
            connection.execute(change)

    def release_job(self, job_id: str, owner: Owner) -> None:
        """Ends the hold of `owner`, if it still has it."""
        with self._write() as (connection, now):
            self._credit_time(connection, job_id, owner, now)
            held = update(jobs).where(jobs.c.id == job_id, jobs.c.owner == owner.to_text())
            connection.execute(held.values(owner=None, owner_seen_at=None))

    def request_cancel(self, job_id: str) -> JobState:
        """Asks the job's workers to stop (their heartbeats hear of it); returns the job's state."""
        with self._write() as (connection, now):
            if enter_state(connection, job_id, JobState.CANCELLING):
                add_event(connection, job_id, now, "cancel_requested")
            return load_job(connection, job_id).state

    def finish_cancel(self, job_id: str) -> bool:
        """Cancels what no live owner runs; True once the job is cancelled, False while one works on it."""
        with self._write() as (connection, now):
            if load_job(connection, job_id).state == JobState.CANCELLING:
                self._drop_shards(connection, job_id, now)
                if not has_shards(connection, job_id, [ShardState.RUNNING]):
                    enter_state(connection, job_id, JobState.CANCELLED, {"finished_at": now})
                    add_event(connection, job_id, now, "cancelled")
            return load_job(connection, job_id).state == JobState.CANCELLED

    def resume_job(self, job_id: str) -> JobState:
        """Puts a failed, cancelled or expired job back in progress, its undone shards in the queue.

        Raises RefusedError when a later job took the output folder over.
        """
        with self._write() as (connection, now):
            job = load_job(connection, job_id)
            if job.state not in RESUMABLE_JOB_STATES:
                return job.state
            self._check_newest(connection, job)
            values = {"message": None, "finished_at": None, **NOT_FINALIZING}
            enter_state(connection, job_id, JobState.IN_PROGRESS, values)
            stopped = shards.c.state.in_([ShardState.FAILED, ShardState.CANCELLED])
            undone = update(shards).where(shards.c.job_id == job_id, stopped)
            connection.execute(undone.values(state=ShardState.QUEUED, message=None, crash_count=0))
            add_event(connection, job_id, now, "resumed")
            return JobState.IN_PROGRESS

    def fail_job(self, job_id: str, message: str) -> bool:
        """Ends a job in progress as failed (through finalizing); its other workers are told to stop."""
        with self._write() as (connection, now):
            if not enter_state(connection, job_id, JobState.FINALIZING, {"finished_at": now}):
                return False
            enter_state(connection, job_id, JobState.FAILED, {"message": message})
            add_event(connection, job_id, now, "failed", {"message": message})
            return True

    def status(self, job_id: str) -> JobStatus:
        """Everything about a job in numbers, from the database only."""
        with self._read() as (connection, now):
            return load_status(connection, job_id, now, self._lease_s)

    def learned_rows_per_s(self, fingerprint: str, max_tokens: int | None) -> float | None:
        """Rows a second that the last jobs of this model and max_tokens reached; None without any."""
        with self._read() as (connection, _):
            return load_learned_rows_per_s(connection, fingerprint, max_tokens)

    def record_event(self, job_id: str, kind: str, detail: Mapping[str, Any] | None = None) -> None:
        """Adds one line to the job's history."""
        with self._write() as (connection, now):
            add_event(connection, job_id, now, kind, detail)

    def _check_not_live(self, job: JobRecord, owner: Owner | None, now: float) -> None:
        holder = job.owner
        if holder is None or holder == owner:
            return
        seen_lately = (job.owner_seen_at or 0.0) + self._lease_s >= now
        if is_alive(holder) if is_local(holder) else seen_lately:
            raise JobIsLive(job.job_id, str(holder))

    def _check_newest(self, connection: Connection, job: JobRecord) -> None:
        query = select(jobs.c.id).where(jobs.c.output == job.output)
        newest = connection.scalar(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(1))
        if newest != job.job_id:
            raise RefusedError(
                f"job {job.job_id} can't go on: its output folder belongs to the later job {newest}"
            )

    def _replace_jobs(
        self, connection: Connection, output: str, job_id: str, owner: Owner | None, now: float
    ) -> None:
        query = select_jobs().where(jobs.c.output == output, jobs.c.state.in_(_PENDING))
        for earlier in map(build_job, connection.execute(query).all()):
            self._check_not_live(earlier, owner, now)
            message = f"its output folder was given to {job_id}"
            values = {"state": JobState.CANCELLED, "message": message, "finished_at": now, "owner": None}
            connection.execute(update(jobs).where(jobs.c.id == earlier.job_id).values(values))
            open_shards = update(shards).where(
                shards.c.job_id == earlier.job_id, shards.c.state.not_in(TERMINAL_SHARD_STATES)
            )
            connection.execute(open_shards.values(state=ShardState.CANCELLED, owner=None, lease_until=None))
            add_event(connection, earlier.job_id, now, "replaced", {"by": job_id})

    def _drop_shards(self, connection: Connection, job_id: str, now: float) -> None:
        """Queued shards become cancelled, and running ones that nobody alive runs."""
        abandoned = self._abandoned(connection, job_id, now)
        dropped = select(shards.c.id).where(abandoned)
        ended = attempts.c.shard_id.in_(dropped), attempts.c.outcome == AttemptOutcome.RUNNING
        connection.execute(update(attempts).where(*ended).values(outcome=AttemptOutcome.LOST, ended_at=now))
        values = {"state": ShardState.CANCELLED, "owner": None, "lease_until": None}
        connection.execute(update(shards).where(abandoned).values(values))
        queued = update(shards).where(shards.c.job_id == job_id, shards.c.state == ShardState.QUEUED)
        connection.execute(queued.values(state=ShardState.CANCELLED))
