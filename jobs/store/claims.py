"""Which shard a process gets next, of the jobs that its model may run: one job (a run), or all of the queue.

A claim raises the shard's fence and sets its lease. On PostgreSQL claimers pass over rows that another one is
about to take (SKIP LOCKED); on SQLite the whole claim is one BEGIN IMMEDIATE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, func, insert, or_, select, update

from gristmill.jobs.owner import Owner
from gristmill.jobs.records import ModelOffer, ShardClaim
from gristmill.jobs.states import AttemptOutcome, JobState, ShardState
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import belongs_to, change_job
from gristmill.jobs.store.models import attempts, jobs, shards
from gristmill.jobs.store.shard_rows import (
    build_part,
    build_range,
    end_attempt,
    find_abandoned,
    is_unchanged,
    load_running,
    off_hands,
)

MAX_LOSSES = 20
_JOB_COLUMNS = (
    *(jobs.c.id, jobs.c.model, jobs.c.dtype, jobs.c.priority, jobs.c.prefix_key, jobs.c.created_at),
    *(jobs.c.fingerprint, jobs.c.started_at, jobs.c.owner_seen_at),
)


class _OpenJob(NamedTuple):
    """A job that has a shard to give away."""

    row: Any  # _JOB_COLUMNS
    abandoned: Sequence[Any]  # running shards that nobody alive runs, lowest first
    num_running: int


class Claims:
    """Who gets which shard."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def next(self, offer: ModelOffer, owner: Owner, warm: Collection[str] = ()) -> ShardClaim | None:
        """The lowest free shard (queued; or owner dead, lease over) of some job that the offer is for; None: none.

        First by priority, then from the job with the fewest running shards (a long job does not hold up a
        short one), then a job whose prefix_key is in `warm`, then the oldest job. The first claim of a job
        pins the model's fingerprint.
        """
        with self._database.write() as (connection, now):
            found = _find_open_jobs(connection, _is_runnable(offer, now), now)
            for position, job in enumerate(sorted(found, key=lambda job: _rank(job, warm))):
                # Only the first lock is waited for: jobs are not looked at in the order of locks.
                claim = self._claim_of_job(connection, job, offer, owner, now, waits=position == 0)
                if claim is not None:
                    return claim
        return None

    def has_work(self, offer: ModelOffer) -> bool:
        """Whether `next` has something to give: a look that holds up nobody."""
        with self._database.read() as (connection, now):
            return bool(_find_open_jobs(connection, _is_runnable(offer, now), now))

    def wanted_models(self) -> list[tuple[str, str]]:
        """(model, dtype) of every job of the queue that has a shard to give away, each once, sorted."""
        with self._database.read() as (connection, now):
            found = _find_open_jobs(connection, _is_open(now), now)
        return sorted({(job.row.model, job.row.dtype) for job in found})

    def _claim_of_job(
        self, connection: Connection, job: _OpenJob, offer: ModelOffer, owner: Owner, now: float, waits: bool
    ) -> ShardClaim | None:
        """Claims of one job; the first one, and the first after a pause, also change the job's row."""
        seen_at = job.row.owner_seen_at
        is_going_on = seen_at is not None and seen_at >= now - self._database.lease_s
        if is_going_on and job.row.started_at is not None and job.row.fingerprint:
            return self._claim_lowest(connection, job, owner, now)
        changing = select(jobs.c.id).where(jobs.c.id == job.row.id, *_is_runnable(offer, now))
        if connection.scalar(changing.with_for_update(key_share=True, skip_locked=not waits)) is None:
            return None  # another worker pinned another fingerprint, or the job was stopped
        claim = self._claim_lowest(connection, job, owner, now)
        if claim is not None:
            values: dict[str, Any] = {"fingerprint": offer.fingerprint}
            if not is_going_on:  # the pause is no active time
                values |= {"owner_seen_at": now, "lease_s": self._database.lease_s}
            change_job(connection, job.row.id, values)
        return claim

    def _claim_lowest(
        self, connection: Connection, job: _OpenJob, owner: Owner, now: float
    ) -> ShardClaim | None:
        """The job's lowest free shard. Its row is locked from the look until the end of the transaction."""
        row = _lock_lowest(connection, job)
        if row is None:
            return None
        if row.state == ShardState.RUNNING:
            end_attempt(connection, row.id, row.fence, AttemptOutcome.LOST, now)
            if _is_deadly(connection, row.id):
                message = (
                    f"{MAX_LOSSES} workers in a row ended while they ran this shard, with no row finished"
                )
                failed = off_hands(ShardState.FAILED) | {"message": message}
                connection.execute(update(shards).where(shards.c.id == row.id).values(failed))
                return self._claim_lowest(connection, job, owner, now)
        fence = row.fence + 1
        changed = connection.execute(
            update(shards)
            .where(shards.c.id == row.id, shards.c.fence == row.fence, shards.c.state == row.state)
            .values(
                state=ShardState.RUNNING,
                fence=fence,
                owner=owner.to_text(),
                lease_until=now + self._database.lease_s,
                rows_reported=row.part_rows,
                started_at=func.coalesce(shards.c.started_at, now),
            )
        )
        assert changed.rowcount == 1, "the row is locked by this transaction"
        attempt = insert(attempts).values(
            shard_id=row.id,
            fence=fence,
            owner=owner.to_text(),
            outcome=AttemptOutcome.RUNNING,
            started_at=now,
        )
        attempt_id = connection.execute(attempt.returning(attempts.c.id)).scalar_one()
        if job.row.started_at is None:
            change_job(connection, row.job_id, {"started_at": now}, jobs.c.started_at.is_(None))
        return ShardClaim(
            shard_id=row.id,
            job_id=row.job_id,
            fence=fence,
            attempt_id=attempt_id,
            owner=owner,
            range=build_range(row),
            part=build_part(row),
            crash_count=row.crash_count,
            strip_errors=row.strip_errors,
        )


def _is_deadly(connection: Connection, shard_id: int) -> bool:
    """Whether the last MAX_LOSSES attempts were all lost with nothing committed: chance does not do that."""
    last = select(attempts.c.outcome, attempts.c.rows_committed).where(attempts.c.shard_id == shard_id)
    rows = connection.execute(last.order_by(attempts.c.fence.desc()).limit(MAX_LOSSES)).all()
    lost = [row for row in rows if row.outcome == AttemptOutcome.LOST and not row.rows_committed]
    return len(lost) == MAX_LOSSES


def _is_open(now: float, job_id: str | None = None) -> list[ColumnElement[bool]]:
    """The conditions for a job whose shards may be claimed: a run's own, or any of the queue."""
    return [
        jobs.c.state == JobState.IN_PROGRESS,
        belongs_to(None) if job_id is None else jobs.c.id == job_id,
        or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now),
        or_(jobs.c.deadline_at.is_(None), jobs.c.deadline_at > now),
    ]


def _is_runnable(offer: ModelOffer, now: float) -> list[ColumnElement[bool]]:
    return [
        *_is_open(now, offer.job_id),
        jobs.c.model == offer.name,
        jobs.c.dtype.in_(offer.dtypes),
        jobs.c.fingerprint.in_(["", offer.fingerprint]),
    ]


def _find_open_jobs(
    connection: Connection, conditions: Iterable[ColumnElement[bool]], now: float
) -> list[_OpenJob]:
    queued = shards.c.job_id == jobs.c.id, shards.c.state == ShardState.QUEUED
    first = select(shards.c.shard_index).where(*queued).order_by(shards.c.shard_index).limit(1)
    query = select(*_JOB_COLUMNS, first.scalar_subquery().label("first_queued")).where(*conditions)
    rows = connection.execute(query).all()
    if not rows:
        return []
    running = load_running(connection, [row.id for row in rows])
    abandoned: dict[str, list[Any]] = {}
    for shard in find_abandoned(running, now):
        abandoned.setdefault(shard.job_id, []).append(shard)
    num_running = Counter(shard.job_id for shard in running)
    return [
        _OpenJob(row, left, num_running[row.id] - len(left))
        for row in rows
        if (left := abandoned.get(row.id, [])) or row.first_queued is not None
    ]


def _rank(job: _OpenJob, warm: Collection[str]) -> tuple[Any, ...]:
    row = job.row
    return row.priority, job.num_running, row.prefix_key not in warm, row.created_at, row.id


def _lock_lowest(connection: Connection, job: _OpenJob) -> Row[Any] | None:
    """The lowest shard that is queued, or still abandoned as it was found, and that nobody else takes."""
    queued = select(shards).where(shards.c.job_id == job.row.id, shards.c.state == ShardState.QUEUED)
    first = queued.order_by(shards.c.shard_index).limit(1)
    row = connection.execute(first.with_for_update(skip_locked=True, key_share=True)).one_or_none()
    for shard in job.abandoned:
        if row is not None and row.shard_index < shard.shard_index:
            break
        unchanged = select(shards).where(is_unchanged(shard))
        taken = connection.execute(unchanged.with_for_update(skip_locked=True, key_share=True)).one_or_none()
        if taken is not None:
            return taken
    return row
