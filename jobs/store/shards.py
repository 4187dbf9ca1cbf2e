"""Claimed shards in the database: kept by heartbeats, committed by a fenced UPDATE. Claims: claims.py.

Nobody holds a lock while working. Whoever claims last has the highest fence; the UPDATEs of an older claim
match no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Row, and_, select, update

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import StoreError
from gristmill.jobs.records import CommittedPart, FinishedShard, Heartbeat, PartFile, ShardClaim
from gristmill.jobs.states import AttemptOutcome, ShardState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.job_rows import add_job_stats, clean_text, lock_job, touch_job
from gristmill.jobs.store.models import shards
from gristmill.jobs.store.shard_rows import (
    added_counts,
    build_part,
    build_range,
    change_claimed,
    check_rows,
    end_attempt,
    off_hands,
    part_values,
)

_COMMIT_TRIES = 3
_OUTCOMES = {  # by the state of the shard after a commit
    ShardState.DONE: AttemptOutcome.DONE,
    ShardState.QUEUED: AttemptOutcome.REQUEUED,
    ShardState.RUNNING: AttemptOutcome.RUNNING,
}


class _Commit(NamedTuple):
    """The arguments of one commit."""

    claim: ShardClaim
    part: PartFile | None
    counts: ShardCounts
    stats: JobStats
    after: ShardState
    clear_strip: bool

    def is_in(self, row: Row[Any]) -> bool:
        """Whether the shard already holds this commit: attempts' names are unique, and so are fences."""
        if self.part is not None:
            return bool(row.part_attempt == self.part.attempt)
        is_over = row.fence == self.claim.fence and row.state == self.after
        return bool(is_over and self.after != ShardState.RUNNING)


class Shards:
    """Claimed shards: heartbeats and commits; and what their parts hold."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def heartbeat(self, claims: Sequence[ShardClaim], rows_done: Mapping[int, int]) -> Heartbeat:
        """Renews the leases of `claims` and tells their jobs; `rows_done` reports rows by shard id.

        The claims may be of several jobs. rows_done counts a shard's rows from its beginning, the committed
        ones too.
        """
        owners = {claim.job_id: claim.owner for claim in claims}
        lost: set[int] = set()
        with self._database.write() as (connection, now):
            signals = {
                job_id: touch_job(connection, job_id, owners[job_id], now, self._database.lease_s)
                for job_id in sorted(owners)
            }
            for claim in sorted(claims, key=lambda claim: claim.shard_id):
                values: dict[str, Any] = {"lease_until": now + self._database.lease_s}
                if claim.shard_id in rows_done:
                    values["rows_reported"] = rows_done[claim.shard_id]
                if not change_claimed(connection, claim, values):
                    lost.add(claim.shard_id)
        return Heartbeat(signals, frozenset(lost))

    def commit(
        self,
        claim: ShardClaim,
        part: PartFile | None,
        counts: ShardCounts,
        stats: JobStats,
        *,
        complete: bool = False,
        requeue: bool = False,
        clear_strip: bool = False,
    ) -> bool:
        """Makes `part` the shard's part, and adds `counts` and `stats` of the rows since the last commit.

        complete: the shard is done; requeue: back to the queue; neither: a checkpoint, the claim goes on.
        clear_strip: the part is the one without its error rows, and counts and stats take those out.
        part None: no new rows. False: another attempt owns the shard, this one's file counts for nothing.
        The same call may be made again after an error, when only the reply to the commit may be lost.
        """
        assert not (complete and requeue), "a shard is either done or goes back to the queue"
        after = ShardState.DONE if complete else ShardState.QUEUED if requeue else ShardState.RUNNING
        work = _Commit(claim, part, counts, stats, after, clear_strip)
        for _ in range(_COMMIT_TRIES - 1):
            try:
                return self._commit_once(work)
            except StoreError:
                continue
        return self._commit_once(work)

    def release(self, claim: ShardClaim) -> bool:
        """Gives a claim back to the queue, with nothing committed."""
        return self._end_claim(claim, ShardState.QUEUED, AttemptOutcome.REQUEUED, None)

    def fail(self, claim: ShardClaim, message: str) -> bool:
        """Ends a shard that can't be done; what earlier commits hold is kept."""
        return self._end_claim(claim, ShardState.FAILED, AttemptOutcome.FAILED, message)

    def record_crash(self, claim: ShardClaim) -> int:
        """Counts a death of the engine while this shard ran; returns the count, also for a lost claim."""
        with self._database.write() as (connection, _):
            change_claimed(connection, claim, {"crash_count": shards.c.crash_count + 1})
            count = connection.scalar(select(shards.c.crash_count).where(shards.c.id == claim.shard_id))
            return int(count or 0)

    def mark_published(self, shard_id: int, part: PartFile) -> None:
        """Notes that the part has its part name; nothing happens if a longer one replaced it meanwhile."""
        with self._database.write() as (connection, now):
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
        with self._database.read() as (connection, _):
            query = select(shards).where(condition, shards.c.part_attempt.is_not(None))
            rows = connection.execute(query.order_by(shards.c.shard_index)).all()
        parts = ((row, build_part(row)) for row in rows)
        return [CommittedPart(row.id, part, row.rows_failed) for row, part in parts if part is not None]

    def _commit_once(self, work: _Commit) -> bool:
        claim = work.claim
        with self._database.write() as (connection, now):
            if work.after == ShardState.DONE:
                lock_job(connection, claim.job_id)  # its stats change after the shard, but jobs lock first
            query = select(shards).where(shards.c.id == claim.shard_id).with_for_update(key_share=True)
            row = connection.execute(query).one_or_none()
            if row is None:
                return False
            if work.is_in(row):
                return True  # by an earlier try, whose reply was lost
            if row.fence != claim.fence or row.state != ShardState.RUNNING:
                return False
            total = JobStats.from_json(row.stats)
            total.merge(work.stats)
            changed = change_claimed(connection, claim, self._commit_values(row, work, total, now))
            assert changed, "the row is locked by this transaction"
            if work.after == ShardState.DONE:
                add_job_stats(connection, claim.job_id, total)
            num_new = max(0, work.counts.rows)
            end_attempt(connection, claim.shard_id, claim.fence, _OUTCOMES[work.after], now, num_new=num_new)
            reach("commit.inside")
            return True

    def _commit_values(self, row: Row[Any], work: _Commit, total: JobStats, now: float) -> dict[str, Any]:
        assert row.strip_errors or not work.clear_strip, "there are no error rows to take out"
        is_done = work.after == ShardState.DONE
        assert not (row.strip_errors and is_done), "a shard is not done before its error rows are out"
        values = added_counts(row, work.counts) | {"stats": total.to_json()}
        if work.part is not None:
            values |= part_values(work.part)
        rows_in_part = work.part.rows if work.part else row.part_rows
        check_rows(values, rows_in_part, work.claim.range.num_rows if is_done else None)
        values |= {"rows_reported": rows_in_part, "lease_until": now + self._database.lease_s}
        if work.clear_strip:
            values["strip_errors"] = False
        if work.after != ShardState.RUNNING:
            values |= off_hands(work.after) | ({"finished_at": now} if is_done else {})
        return values

    def _end_claim(
        self, claim: ShardClaim, state: ShardState, outcome: AttemptOutcome, message: str | None
    ) -> bool:
        with self._database.write() as (connection, now):
            values = off_hands(state)
            if message is not None:
                values["message"] = message = clean_text(message)
            if not change_claimed(connection, claim, values):
                return False
            end_attempt(connection, claim.shard_id, claim.fence, outcome, now, message=message)
            return True

    def spooled(self, job_id: str) -> list[FinishedShard]:
        """The shards whose rows lie in a spool, in its order."""
        query = select(shards).where(shards.c.job_id == job_id, shards.c.source_index < 0)
        with self._database.read() as (connection, _):
            rows = connection.execute(query.order_by(shards.c.shard_index)).all()
        return [FinishedShard(build_range(row), build_part(row), row.rows_failed) for row in rows]

    def failure(self, job_id: str) -> str | None:
        """Why the first failed shard failed; None when none did."""
        failed = select(shards.c.message).where(
            shards.c.job_id == job_id, shards.c.state == ShardState.FAILED
        )
        with self._database.read() as (connection, _):
            row = connection.execute(failed.order_by(shards.c.shard_index).limit(1)).one_or_none()
        return None if row is None else row.message or "a shard failed"
