"""Rows of the shards table: the fenced UPDATE, and the way between columns and jobs/records.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, select, update

from gristmill.jobs.owner import Owner, is_dead
from gristmill.jobs.records import PartFile, ShardClaim
from gristmill.jobs.source import ShardRange
from gristmill.jobs.states import AttemptOutcome, ShardState
from gristmill.jobs.stats import ShardCounts
from gristmill.jobs.store.models import attempts, shards


def is_claimed(claim: ShardClaim) -> ColumnElement[bool]:
    """The condition that the claim still holds: same fence, still running."""
    return and_(
        shards.c.id == claim.shard_id, shards.c.fence == claim.fence, shards.c.state == ShardState.RUNNING
    )


def change_claimed(connection: Connection, claim: ShardClaim, values: Mapping[str, Any]) -> bool:
    """The fenced UPDATE: False when the claim is not the newest any more."""
    return connection.execute(update(shards).where(is_claimed(claim)).values(values)).rowcount == 1


def off_hands(state: ShardState) -> dict[str, Any]:
    """The columns of a shard that nobody runs any more."""
    return {"state": state, "owner": None, "lease_until": None}


def end_attempt(
    connection: Connection,
    shard_id: int,
    fence: int,
    outcome: AttemptOutcome,
    now: float,
    *,
    num_new: int = 0,
    message: str | None = None,
) -> None:
    """Ends the running attempt at a shard, if there is one."""
    connection.execute(
        update(attempts)
        .where(attempts.c.shard_id == shard_id, attempts.c.fence == fence)
        .values(
            outcome=outcome,
            message=message,
            rows_committed=attempts.c.rows_committed + num_new,
            ended_at=None if outcome == AttemptOutcome.RUNNING else now,
        )
    )


def added_counts(row: Row[Any], counts: ShardCounts) -> dict[str, Any]:
    """The row's counts with those of a commit added."""
    return {
        "rows_completed": row.rows_completed + counts.completed,
        "rows_failed": row.rows_failed + counts.failed,
        "rows_skipped": row.rows_skipped + counts.skipped,
        "prompt_tokens": row.prompt_tokens + counts.prompt_tokens,
        "completion_tokens": row.completion_tokens + counts.completion_tokens,
        "cached_tokens": row.cached_tokens + counts.cached_tokens,
    }


def part_values(part: PartFile) -> dict[str, Any]:
    """The columns of a part that is committed and not yet published."""
    return {f"part_{name}": value for name, value in asdict(part).items()} | {"published_at": None}


def check_rows(values: Mapping[str, Any], rows_in_part: int, num_rows: int | None) -> None:
    """Asserts that the counts are those of the part, and no more than the shard has."""
    counted = values["rows_completed"] + values["rows_failed"] + values["rows_skipped"]
    assert counted == rows_in_part, f"{counted} rows counted, {rows_in_part} in the part"
    assert num_rows in (None, rows_in_part), f"a shard of {num_rows} rows is not done with {rows_in_part}"


def build_range(row: Row[Any]) -> ShardRange:
    """The range of a shard, from its row."""
    return ShardRange(**{item.name: getattr(row, item.name) for item in fields(ShardRange)})


def build_part(row: Row[Any]) -> PartFile | None:
    """The committed part of a shard, from its row; None before the first commit."""
    if row.part_attempt is None:
        return None
    return PartFile(row.part_path, row.part_attempt, row.part_rows, row.part_bytes, row.part_sha256)


def load_running(connection: Connection, job_ids: Sequence[str]) -> Sequence[Any]:
    """Who runs which shard of these jobs, lowest shard first."""
    columns = shards.c.job_id, shards.c.id, shards.c.shard_index, shards.c.fence, shards.c.owner
    running = shards.c.job_id.in_(job_ids), shards.c.state == ShardState.RUNNING
    query = select(*columns, shards.c.lease_until).where(*running)
    return connection.execute(query.order_by(shards.c.shard_index)).all()


def find_abandoned(running: Sequence[Any], now: float) -> list[Any]:
    """Those whose lease is over, and those whose owner is dead on this host."""
    dead = {text for text in {shard.owner for shard in running} if is_dead(Owner.from_text(text))}
    return [shard for shard in running if shard.lease_until < now or shard.owner in dead]


def is_unchanged(shard: Any) -> ColumnElement[bool]:
    """The condition for a row of load_running that nobody renewed, ended or took since."""
    return and_(
        shards.c.id == shard.id,
        shards.c.state == ShardState.RUNNING,
        shards.c.fence == shard.fence,
        shards.c.lease_until == shard.lease_until,
    )


def drop_shards(connection: Connection, job_id: str, now: float) -> None:
    """Queued shards become cancelled, and running ones that nobody alive runs."""
    dropped = off_hands(ShardState.CANCELLED)
    for shard in find_abandoned(load_running(connection, [job_id]), now):
        if connection.execute(update(shards).where(is_unchanged(shard)).values(dropped)).rowcount == 1:
            end_attempt(connection, shard.id, shard.fence, AttemptOutcome.LOST, now)
    queued = update(shards).where(shards.c.job_id == job_id, shards.c.state == ShardState.QUEUED)
    connection.execute(queued.values(state=ShardState.CANCELLED))


def has_shards(connection: Connection, job_id: str, states: Collection[ShardState]) -> bool:
    """Whether any shard of the job is in one of `states`."""
    query = select(shards.c.id).where(shards.c.job_id == job_id, shards.c.state.in_(states)).limit(1)
    return connection.scalar(query) is not None
