"""Jobs as such: found and read, held by the run they belong to, and their history."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, and_, case, update

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobRecord, JobStatus, Signal
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.folder_rows import check_holder
from gristmill.jobs.store.job_rows import (
    add_event,
    build_job,
    credit_time,
    load_job,
    lock_job,
    normal_output,
    select_jobs,
    touch_job,
)
from gristmill.jobs.store.models import jobs
from gristmill.jobs.store.status import load_learned_rows_per_s, load_status

if TYPE_CHECKING:
    pass


class Jobs:
    """Jobs as such: found, read, held by the run they belong to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, ref: str) -> JobRecord | None:
        """The job that `ref` names: an id, an output folder, or the beginning of an id.

        Of a folder's jobs the newest; one that was refused is meant only if there is no other.
        """
        was_refused = case((and_(jobs.c.state == JobState.FAILED, jobs.c.num_shards == 0), 1), else_=0)
        newest = select_jobs().order_by(was_refused, jobs.c.created_at.desc(), jobs.c.id.desc())
        with self._database.read() as (connection, _):
            for condition in (jobs.c.id == ref, jobs.c.output == normal_output(ref)):
                row = connection.execute(newest.where(condition).limit(1)).one_or_none()
                if row is not None:
                    return build_job(row)
            rows = connection.execute(newest.where(jobs.c.id.startswith(ref, autoescape=True)).limit(2)).all()
        if len(rows) > 1:
            raise RefusedError(
                f"{ref} is the beginning of several job ids: give more of it (`gristmill list`)"
            )
        return build_job(rows[0]) if rows and ref else None

    def load(self, job_id: str) -> JobRecord:
        """The job as it is now. Raises StoreError when there is none of that id."""
        with self._database.read() as (connection, _):
            return load_job(connection, job_id)

    def newest(self, limit: int = 50) -> list[JobRecord]:
        """The newest jobs, newest first."""
        return self._load(select_jobs().limit(limit))

    def of_output(self, output: str) -> list[JobRecord]:
        """All jobs of an output, newest first."""
        return self._load(select_jobs().where(jobs.c.output == normal_output(output)))

    def _load(self, query: Select[Any]) -> list[JobRecord]:
        with self._database.read() as (connection, _):
            rows = connection.execute(query.order_by(jobs.c.created_at.desc(), jobs.c.id.desc()))
            return [build_job(row) for row in rows]

    def hold(self, job_id: str, owner: Owner) -> None:
        """Makes `owner` the one process that runs the job. Raises JobIsLive while another one does."""
        with self._database.write() as (connection, now):
            load_job(connection, job_id)
            job = lock_job(connection, job_id)
            assert job is not None, "it was just read"
            if job.runner == Runner.WORKERS:
                raise RefusedError(
                    f"job {job_id} belongs to the queue's workers: see `gristmill status {job_id}`"
                )
            check_holder(job, owner, now, self._database.lease_s)
            values = {"owner": owner.to_text(), "owner_seen_at": now, "lease_s": self._database.lease_s}
            connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))

    def release(self, job_id: str, owner: Owner) -> None:
        """Ends the hold of `owner`, if it still has it."""
        with self._database.write() as (connection, now):
            credit_time(connection, job_id, owner, now, self._database.lease_s)
            held = update(jobs).where(jobs.c.id == job_id, jobs.c.owner == owner.to_text())
            connection.execute(held.values(owner=None, owner_seen_at=None))

    def touch(self, job_ids: Collection[str], owner: Owner) -> dict[str, Signal]:
        """A heartbeat without claims: says that `owner` works on these jobs, and hears whether to go on."""
        with self._database.write() as (connection, now):
            lease_s = self._database.lease_s
            return {
                job_id: touch_job(connection, job_id, owner, now, lease_s) for job_id in sorted(set(job_ids))
            }

    def status(self, job_id: str) -> JobStatus:
        """Everything about a job in numbers, from the database only."""
        with self._database.read() as (connection, now):
            return load_status(connection, job_id, now, self._database.lease_s)

    def learned_rows_per_s(self, fingerprint: str, max_tokens: int | None) -> float | None:
        """Rows a second that the last jobs of this model and max_tokens reached; None without any."""
        with self._database.read() as (connection, _):
            return load_learned_rows_per_s(connection, fingerprint, max_tokens)

    def record_event(self, job_id: str, kind: str, detail: Mapping[str, Any] | None = None) -> None:
        """Adds one line to the job's history."""
        with self._database.write() as (connection, now):
            add_event(connection, job_id, now, kind, detail)
