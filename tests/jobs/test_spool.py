"""Rows through a spool: sorted in bounded memory, cut into shards, read back as they were, kept where they failed."""

from __future__ import annotations

import random
import tempfile
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.jobs.errors import SourceError
from gristmill.jobs.regroup.external_sort import ExternalSorter, SortItem
from gristmill.jobs.regroup.records import ValueTypeError, to_record
from gristmill.jobs.regroup.spool import (
    delete_spool,
    delete_spools,
    keep_failed_rows,
    list_spool,
    load_spool_rows,
    needed_after_end,
    new_spool_id,
    spool_name,
    write_spool,
)
from gristmill.jobs.row_errors import RowError
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange
from gristmill.jobs.storage.folder import Storage, open_storage

ZONED = pa.scalar(1_700_000_000_123_456, pa.timestamp("us", "Europe/Berlin")).as_py()
VALUES: dict[str, Any] = {
    "text": "tệxt \ud800",
    "big": 1 << 80,
    "float": 0.1,
    "null": None,
    "flag": True,
    "bytes": b"\x00\xff",
    "list": [{"a": [1, ("k", 2)]}],
    "date": date(2026, 1, 2),
    "time": time(1, 2, 3, 4),
    "span": timedelta(-1, 5, 6),
    "moment": datetime(1, 1, 1, 2, 3),
    "utc": datetime(2026, 1, 1, tzinfo=UTC),
    "zoned": ZONED,
    "decimal": Decimal("1.50"),
    "uuid": uuid.UUID(int=5),
}


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, out: Path) -> Storage:
    if request.param == "s3":
        return open_storage(f"{request.getfixturevalue('s3_root')}/out")
    return open_storage(str(out))


def build_items(num_rows: int, num_groups: int) -> list[SortItem]:
    """Rows of two sources, shuffled, that belong to groups."""
    chance = random.Random(num_rows)
    items = []
    for i in range(num_rows):
        group = chance.randrange(num_groups)
        row = Row(i % 2, i, {"text": f"{group}", "unused": 1})
        key = f"{group:04d} {i}".encode()
        items.append(SortItem(key, row.source_index, row.row_index, to_record(row, ["text"])))
    chance.shuffle(items)
    return items


def spool(storage: Storage, items: list[SortItem], shard_rows: int, **how: Any) -> tuple[ShardRange, ...]:
    spooled = write_spool(
        storage, new_spool_id(), sorted(items), shard_rows, **{"is_exact": False, "file_bytes": 2000} | how
    )
    assert spooled.plan.num_rows == len(items)
    return spooled.plan.shards


def load(storage: Storage, shard: ShardRange) -> list[Row]:
    return [row for rows in load_spool_rows(storage, shard) for row in rows]


def test_values_of_every_type_come_back_equal_and_of_their_type(storage: Storage) -> None:
    rows = [Row(3, 7, VALUES), Row(4, 8, None, RowError("invalid_json", "in.jsonl line 9: no"))]
    items = [SortItem(b"", row.source_index, row.row_index, to_record(row, VALUES)) for row in rows]
    [shard] = spool(storage, items, 10)
    found, broken = load(storage, shard)
    assert (found.source_index, found.row_index, found.error) == (3, 7, None)
    assert found.values == VALUES
    assert [type(value) for value in found.values.values()] == [type(value) for value in VALUES.values()]
    assert found.values["zoned"].isoformat() == ZONED.isoformat()
    assert (broken.source_index, broken.row_index, broken.values) == (4, 8, None)
    assert broken.error is not None
    assert (broken.error.code, broken.error.message) == ("invalid_json", "in.jsonl line 9: no")


def test_a_value_that_would_not_come_back_is_refused() -> None:
    with pytest.raises(ValueTypeError, match="complex"):
        to_record(Row(0, 0, {"x": 1j}), ["x"])


@pytest.mark.parametrize("run_bytes", [1 << 20, 4000, 1])
def test_a_sort_in_small_memory_is_a_sort(run_bytes: int) -> None:
    items = build_items(500, 20)
    with tempfile.TemporaryFile() as scratch:
        sorter = ExternalSorter(scratch, run_bytes)
        for item in items:
            sorter.add(item)
        assert list(sorter.iterate_sorted()) == sorted(items)


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_shards_are_the_spool_in_order_each_row_once(storage: Storage, is_exact: bool) -> None:
    items = build_items(400, 12)
    shards = spool(storage, items, 40, is_exact=is_exact)
    assert len({shard.source_index for shard in shards}) > 1  # several files
    assert [shard.shard_index for shard in shards] == list(range(len(shards)))
    rows = [row for shard in shards for row in load(storage, shard)]
    expected = [(item.source_index, item.row_index) for item in sorted(items)]
    assert [(row.source_index, row.row_index) for row in rows] == expected
    assert all(set(row.values or ()) == {"text"} for row in rows)
    assert max(shard.num_rows for shard in shards) <= (40 if is_exact else 45)


def test_a_shard_ends_where_a_group_ends_if_that_is_near(storage: Storage) -> None:
    items = [
        SortItem(f"{i // 21:04d} {i}".encode(), 0, i, to_record(Row(0, i, {"text": ""}), ["text"]))
        for i in range(210)
    ]
    shards = spool(storage, items, 40, file_bytes=1 << 20)
    assert [shard.num_rows for shard in shards] == [42] * 5


def test_a_spool_that_is_gone_or_damaged_is_said_to_be(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "out"))
    shards = spool(storage, build_items(100, 3), 50, file_bytes=1 << 20)
    path = Path(storage.place(spool_name(shards[0].source_index)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert len(load(storage, shards[0])) == shards[0].num_rows
    with pytest.raises(SourceError, match="not as it was written"):
        load(storage, shards[-1])
    path.write_bytes(whole.replace(b"text", b"texx"))
    with pytest.raises(SourceError, match="not as it was written"):
        load(storage, shards[0])
    path.unlink()
    with pytest.raises(SourceError, match="is gone: start over"):
        load(storage, shards[0])


def test_of_a_job_that_ended_the_failed_rows_are_kept(storage: Storage) -> None:
    items = build_items(60, 5)
    shards = spool(storage, items, 30)
    files = list_spool(storage)
    failed = {(row.source_index, row.row_index) for row in load(storage, shards[1])[3:6]}
    for _ in range(2):  # again, as after a crash
        keep_failed_rows(storage, shards[1], failed)
    needed = needed_after_end(shards[1:2])
    assert needed.isdisjoint(files)
    storage.delete_all(files)
    keep_failed_rows(storage, shards[1], failed)  # a second end
    assert {(row.source_index, row.row_index) for row in load(storage, shards[1])} == failed
    assert set(list_spool(storage)) == needed


def test_one_spool_does_not_touch_another(storage: Storage) -> None:
    items = build_items(40, 2)
    first, second = new_spool_id(), new_spool_id()
    for spool_id in (first, second):
        plan = write_spool(storage, spool_id, sorted(items), 20, is_exact=True).plan
    delete_spool(storage, first)
    assert len(load(storage, plan.shards[0])) == 20
    write_spool(storage, first, sorted(items), 20, is_exact=True)
    delete_spools(storage, spare=second)
    assert len(list_spool(storage)) == 1
    assert len(load(storage, plan.shards[1])) == 20
    delete_spools(storage)
    assert list_spool(storage) == [] and "_spool" not in storage.names()
