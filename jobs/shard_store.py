"""Shards in the database: claimed under fence and lease, kept by heartbeats, committed by a fenced UPDATE.

Nobody holds a lock while working. Whoever claims last has the highest fence; the UPDATEs of an older claim
match no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, func, insert, or_, select, update

from jobs.database import database_now, read_transaction, write_transaction
from jobs.errors import StoreError
from jobs.models import attempts, jobs, shards
from jobs.owner import Owner, is_dead
from jobs.records import CommittedPart, Heartbeat, PartFile, ShardClaim, Signal
from jobs.shard_rows import (
    added_counts,
    build_part,
    build_range,
    change_claimed,
    check_rows,
    end_attempt,
    is_claimed,
    part_values,
)
from jobs.states import AttemptOutcome, JobState, ShardState
from jobs.stats import JobStats, ShardCounts

LEASE_S = 60.0
_COMMIT_TRIES = 3
_WORKING = (JobState.IN_PROGRESS, JobState.CANCELLING)


class ShardStore:
    """The shards' half of Store."""

    def __init__(self, engine: Engine, clock: Callable[[], float] | None, lease_s: float) -> None:
        self._engine = engine
        self._clock = clock
        self._lease_s = lease_s

    @contextmanager
    def _write(self) -> Iterator[tuple[Connection, float]]:
        with write_transaction(self._engine) as connection:
            yield connection, database_now(connection, self._clock)

    @contextmanager
    def _read(self) -> Iterator[tuple[Connection, float]]:
        with read_transaction(self._engine) as connection:
            yield connection, database_now(connection, self._clock)

    def claim_shard(self, job_id: str, owner: Owner) -> ShardClaim | None:
        """The lowest shard that is queued or abandoned (owner dead, lease over); None: nothing to do now."""
        with self._write() as (connection, now):
            state = connection.scalar(select(jobs.c.state).where(jobs.c.id == job_id))
            if state != JobState.IN_PROGRESS:
                return None
            free = or_(shards.c.state == ShardState.QUEUED, self._abandoned(connection, job_id, now))
            query = (
                select(shards).where(shards.c.job_id == job_id, free).order_by(shards.c.shard_index).limit(1)
            )
            row = connection.execute(query.with_for_update(skip_locked=True)).one_or_none()
            if row is None:
                return None
            if row.state == ShardState.RUNNING:
                end_attempt(connection, row.id, row.fence, AttemptOutcome.LOST, now)
            fence = row.fence + 1
            changed = connection.execute(
                update(shards)
                .where(shards.c.id == row.id, shards.c.fence == row.fence, shards.c.state == row.state)
                .values(
                    state=ShardState.RUNNING,
                    fence=fence,
                    owner=owner.to_text(),
                    lease_until=now + self._lease_s,
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
            start = (
                update(jobs).where(jobs.c.id == job_id, jobs.c.started_at.is_(None)).values(started_at=now)
            )
            connection.execute(start)
            return ShardClaim(
                row.id, job_id, fence, attempt_id, owner, build_range(row), build_part(row), row.crash_count
            )

    def heartbeat(self, claims: Sequence[ShardClaim], rows_done: Mapping[int, int]) -> Heartbeat:
        """Renews the leases of `claims` and the holds of their jobs, and reports done rows by shard id.

        rows_done counts a shard's rows from its beginning, the committed ones too.
        """
        lost: set[int] = set()
        with self._write() as (connection, now):
            for claim in claims:
                values: dict[str, Any] = {"lease_until": now + self._lease_s}
                if claim.shard_id in rows_done:
                    values["rows_reported"] = rows_done[claim.shard_id]
                if not change_claimed(connection, claim, values):
                    lost.add(claim.shard_id)
            signals = {
                self._touch(connection, job_id, owner, now)
                for job_id, owner in {(claim.job_id, claim.owner) for claim in claims}
            }
        if Signal.CANCEL in signals:
            return Heartbeat(Signal.CANCEL, frozenset(lost))
        return Heartbeat(Signal.LOST if lost else Signal.CONTINUE, frozenset(lost))

    def touch_job(self, job_id: str, owner: Owner) -> Signal:
        """A heartbeat without claims: renews the hold on the job, and says whether to go on."""
        with self._write() as (connection, now):
            return self._touch(connection, job_id, owner, now)

    def commit_shard(
        self,
        claim: ShardClaim,
        part: PartFile | None,
        counts: ShardCounts,
        stats: JobStats,
        *,
        complete: bool = False,
        requeue: bool = False,
    ) -> bool:
        """Makes `part` the shard's part, and adds `counts` and `stats` of the rows since the last commit.

        complete: the shard is done; requeue: back to the queue; neither: a checkpoint, the claim goes on.
        part None: no new rows. False: another attempt owns the shard, this one's file counts for nothing.
        """
        assert not (complete and requeue), "a shard is either done or goes back to the queue"
        for _ in range(_COMMIT_TRIES - 1):
            try:
                return self._commit_once(claim, part, counts, stats, complete, requeue)
            except StoreError:
                # The reply to COMMIT may be what was lost, and not the commit.
                if part is not None and self._is_committed(claim, part):
                    return True
        return self._commit_once(claim, part, counts, stats, complete, requeue)

    def release_shard(self, claim: ShardClaim) -> bool:
        """Gives a claim back to the queue, with nothing committed."""
        return self._end_claim(claim, ShardState.QUEUED, AttemptOutcome.REQUEUED, None)

    def fail_shard(self, claim: ShardClaim, message: str) -> bool:
        """Ends a shard that can't be done; what earlier commits hold is kept."""
        return self._end_claim(claim, ShardState.FAILED, AttemptOutcome.FAILED, message)

    def record_crash(self, claim: ShardClaim) -> int:
        """Counts a death of the engine while this shard ran; returns the count, also for a lost claim."""
        with self._write() as (connection, _):
            change_claimed(connection, claim, {"crash_count": shards.c.crash_count + 1})
            count = connection.scalar(select(shards.c.crash_count).where(shards.c.id == claim.shard_id))
            return int(count or 0)

    def mark_published(self, shard_id: int, part: PartFile) -> None:
        """Notes that the part has its part name; nothing happens if a longer one replaced it meanwhile."""
        with self._write() as (connection, now):
            connection.execute(
                update(shards)
                .where(shards.c.id == shard_id, shards.c.part_attempt == part.attempt)
                .where(shards.c.published_at.is_(None))
                .values(published_at=now)
            )

    def committed_parts(self, job_id: str) -> list[CommittedPart]:
        """The parts that count, in input order."""
        return self._parts(shards.c.job_id == job_id)

    def unpublished_parts(self, job_id: str) -> list[CommittedPart]:
        """Committed parts whose publication was not yet noted."""
        return self._parts(and_(shards.c.job_id == job_id, shards.c.published_at.is_(None)))

    def _parts(self, condition: ColumnElement[bool]) -> list[CommittedPart]:
        with self._read() as (connection, _):
            query = select(shards).where(condition, shards.c.part_attempt.is_not(None))
            rows = connection.execute(query.order_by(shards.c.shard_index)).all()
        parts = ((row, build_part(row)) for row in rows)
        return [CommittedPart(row.id, part, row.rows_failed) for row, part in parts if part is not None]

    def _abandoned(self, connection: Connection, job_id: str, now: float) -> ColumnElement[bool]:
        """The condition for a running shard whose owner is dead on this host, or whose lease ran out."""
        running = and_(shards.c.job_id == job_id, shards.c.state == ShardState.RUNNING)
        owners = connection.scalars(select(shards.c.owner).where(running).distinct()).all()
        dead = [text for text in owners if is_dead(Owner.from_text(text))]
        return and_(running, or_(shards.c.lease_until < now, shards.c.owner.in_(dead)))

    def _touch(self, connection: Connection, job_id: str, owner: Owner, now: float) -> Signal:
        self._credit_time(connection, job_id, owner, now)
        state = connection.scalar(select(jobs.c.state).where(jobs.c.id == job_id))
        return Signal.CONTINUE if state == JobState.IN_PROGRESS else Signal.CANCEL

    def _credit_time(self, connection: Connection, job_id: str, owner: Owner, now: float) -> None:
        """Renews the hold and adds the time since its last renewal to the job's active time."""
        passed = now - jobs.c.owner_seen_at
        credit = case((passed < 0, 0.0), (passed > self._lease_s, self._lease_s), else_=passed)
        held = and_(jobs.c.id == job_id, jobs.c.owner == owner.to_text())
        working = and_(held, jobs.c.state.in_(_WORKING))
        connection.execute(update(jobs).where(working).values(active_s=jobs.c.active_s + credit))
        connection.execute(update(jobs).where(held).values(owner_seen_at=now))

    def _commit_once(
        self,
        claim: ShardClaim,
        part: PartFile | None,
        counts: ShardCounts,
        stats: JobStats,
        complete: bool,
        requeue: bool,
    ) -> bool:
        with self._write() as (connection, now):
            row = connection.execute(select(shards).where(is_claimed(claim)).with_for_update()).one_or_none()
            if row is None:
                return False
            total = JobStats.from_json(row.stats)
            total.merge(stats)
            values = added_counts(row, counts) | {"stats": total.to_json()}
            if part is not None:
                values |= part_values(part)
            rows_in_part = part.rows if part else row.part_rows
            check_rows(values, rows_in_part, claim.range.num_rows if complete else None)
            values |= {"rows_reported": rows_in_part, "lease_until": now + self._lease_s}
            outcome = AttemptOutcome.RUNNING
            if complete:
                values |= {"state": ShardState.DONE, "finished_at": now, "owner": None, "lease_until": None}
                outcome = AttemptOutcome.DONE
                _add_to_job(connection, claim.job_id, total)
            elif requeue:
                values |= {"state": ShardState.QUEUED, "owner": None, "lease_until": None}
                outcome = AttemptOutcome.REQUEUED
            if not change_claimed(connection, claim, values):
                return False
            end_attempt(connection, claim.shard_id, claim.fence, outcome, now, num_new=counts.rows)
            return True

    def _is_committed(self, claim: ShardClaim, part: PartFile) -> bool:
        with self._read() as (connection, _):
            attempt = connection.scalar(select(shards.c.part_attempt).where(shards.c.id == claim.shard_id))
            return bool(attempt == part.attempt)

    def _end_claim(
        self, claim: ShardClaim, state: ShardState, outcome: AttemptOutcome, message: str | None
    ) -> bool:
        with self._write() as (connection, now):
            values = {"state": state, "message": message, "owner": None, "lease_until": None}
            if not change_claimed(connection, claim, values):
                return False
            end_attempt(connection, claim.shard_id, claim.fence, outcome, now, message=message)
            return True


def _add_to_job(connection: Connection, job_id: str, stats: JobStats) -> None:
    """Adds a done shard's stats to its job's, so that a status need not read those of a thousand shards."""
    is_job = jobs.c.id == job_id
    total = JobStats.from_json(connection.scalar(select(jobs.c.stats).where(is_job).with_for_update()))
    total.merge(stats)
    connection.execute(update(jobs).where(is_job).values(stats=total.to_json()))
