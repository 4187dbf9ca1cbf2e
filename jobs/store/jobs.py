"""Jobs as such: found and read, written down with their shards by a local run, held by it, and its history."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, and_, case, insert, update

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobRecord, JobStatus, Signal
from gristmill.jobs.source import Plan, Source
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.folder_rows import check_holder, replace_jobs
from gristmill.jobs.store.job_rows import (
    add_event,
    build_job,
    build_job_id,
    credit_time,
    insert_shards,
    load_job,
    lock_job,
    lock_output,
    normal_output,
    plan_figures,
    plan_values,
    select_jobs,
    touch_job,
)
from gristmill.jobs.store.models import jobs
from gristmill.jobs.store.status import load_learned_rows_per_s, load_status

if TYPE_CHECKING:
    import pyarrow as pa

    from gristmill.jobs.spec import JobSpec


class Jobs:
    """Jobs as such: found, read, written down, held by a local run."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(  # noqa: PLR0913
        self,
        spec: JobSpec,
        sources: Sequence[Source],
        plan: Plan,
        fingerprint: str,
        identity: str,
        part_schema: pa.Schema,
        owner: Owner | None = None,
        regrouped: Mapping[str, Any] | None = None,
    ) -> JobRecord:
        """A job in progress with all its shards queued, held by `owner` from the start.

        It takes its output folder over: an unfinished earlier job of it is cancelled. Raises JobIsLive
        when a live process holds that job.
        """
        output = normal_output(spec.output)
        with self._database.write() as (connection, now):
            lock_output(connection, output)
            job_id = build_job_id(now)
            replace_jobs(connection, output, job_id, owner, now, self._database.lease_s)
            connection.execute(
                insert(jobs).values(
                    id=job_id,
                    state=JobState.IN_PROGRESS,
                    runner=Runner.LOCAL,
                    fingerprint=fingerprint,
                    model=spec.model,
                    output=output,
                    spec=spec.model_dump(mode="json"),
                    max_tokens=spec.max_tokens,
                    dtype=spec.dtype,
                    num_rows=plan.num_rows,
                    num_shards=len(plan.shards),
                    created_at=now,
                    owner=owner.to_text() if owner else None,
                    owner_seen_at=now if owner else None,
                    lease_s=self._database.lease_s,
                    **plan_values(sources, [], part_schema.serialize().to_pybytes(), identity),
                )
            )
            insert_shards(connection, job_id, plan.shards)
            add_event(connection, job_id, now, "created", plan_figures(plan, regrouped))
            return load_job(connection, job_id)

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
