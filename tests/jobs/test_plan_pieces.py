"""A job that is planned by pieces has the rows of one that is planned at once."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.input.formats import jsonl_scan
from gristmill.jobs.input.reading import load_rows
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.plan.pieces import (
    MAX_INLINE_BYTES,
    cut_pieces,
    is_large,
    join_pieces,
    plan_piece,
    ranges_from_json,
    ranges_to_json,
)
from gristmill.jobs.source import Plan, PlanPiece, ShardRange, Source

RECORDS = st.sampled_from([b'{"a":1}', b"", b" ", b"\t\r", b'{"text":"%s"}' % (b"x" * 40), b"bad", b"\x0b"])


def write(folder: Path, name: str, data: bytes) -> Source:
    (folder / name).write_bytes(data)
    return load_sources([str(folder / name)])[0]


def plan_by_pieces(sources: list[Source], piece_bytes: int, shard_rows: int) -> Plan:
    pieces = cut_pieces(sources, piece_bytes)
    texts = [ranges_to_json(plan_piece(sources[p.source_index], p, shard_rows)) for p in pieces]
    return join_pieces(pieces, [ranges_from_json(text) for text in texts])


def read(sources: list[Source], plan: Plan) -> list[tuple[int, int, object]]:
    """Every row, in the order of the shards; an error row by its message, which names its line."""
    rows = []
    for shard in plan.shards:
        for batch in load_rows(sources[shard.source_index], shard, ["a"]):
            for row in batch:
                rows.append((row.source_index, row.row_index, row.values or str(row.error)))
    return rows  # type: ignore[return-value]


def check_equal(sources: list[Source], piece_bytes: int, shard_rows: int) -> Plan:
    whole, joined = plan_shards(sources, shard_rows), plan_by_pieces(sources, piece_bytes, shard_rows)
    assert joined.num_rows == whole.num_rows
    assert [shard.shard_index for shard in joined.shards] == list(range(len(joined.shards)))
    assert max(shard.num_rows for shard in joined.shards) <= shard_rows
    assert read(sources, joined) == read(sources, whole)
    return joined


@settings(max_examples=300, deadline=None)
@given(
    records=st.lists(RECORDS, max_size=30),
    has_mark=st.booleans(),
    is_ended=st.booleans(),
    piece_bytes=st.integers(1, 120),
    shard_rows=st.integers(1, 6),
    scan_bytes=st.sampled_from([1, 5, 1 << 20]),
)
def test_every_record_is_in_exactly_one_shard(
    records: list[bytes], has_mark: bool, is_ended: bool, piece_bytes: int, shard_rows: int, scan_bytes: int
) -> None:
    data = b"\xef\xbb\xbf" * has_mark + b"\n".join(records) + b"\n" * (is_ended and bool(records))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl_scan, "_SCAN_BYTES", scan_bytes)
        patch.setattr(jsonl_scan, "_SEARCH_BYTES", scan_bytes)
        check_equal([write(Path(name), "a.jsonl", data)], piece_bytes, shard_rows)


@pytest.mark.parametrize("piece_bytes", range(1, 20))
def test_a_border_may_lie_anywhere(tmp_path: Path, piece_bytes: int) -> None:
    source = write(tmp_path, "a.jsonl", b'{"a":1}\n\n\n{"a":2}\r\n   \n{"a":3}')
    check_equal([source], piece_bytes, 2)


def test_a_record_longer_than_a_piece_belongs_to_the_one_it_begins_in(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", b'{"a":0}\n{"a":"%s"}\n{"a":2}\n' % (b"x" * 1000))
    pieces = cut_pieces([source], 100)
    assert len(pieces) == 11
    planned = [plan_piece(source, piece, 10) for piece in pieces]
    assert [sum(shard.num_rows for shard in shards) for shards in planned] == [2, *[0] * 9, 1]
    check_equal([source], 100, 10)


def test_every_kind_of_source_is_planned_by_pieces(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(25)}), tmp_path / "c.parquet", row_group_size=10)
    sources = [
        write(tmp_path, "a.jsonl", b'{"a":1}\n' * 50 + b"\n\n"),
        write(tmp_path, "b.jsonl.gz", gzip.compress(b'{"a":2}\n\n' * 30)),
        *load_sources([str(tmp_path / "c.parquet")]),
        write(tmp_path, "d.jsonl", b""),
    ]
    assert [(p.source_index, p.byte_offset, p.byte_size) for p in cut_pieces(sources, 150)] == [
        (0, 0, 150),
        (0, 150, 150),
        (0, 300, 102),
        (1, 0, 0),
        (2, 0, 0),
        (3, 0, 0),
    ]
    assert check_equal(sources, 150, 7).num_rows == 105


def test_no_rows_is_one_shard_of_none(tmp_path: Path) -> None:
    sources = [write(tmp_path, "a.jsonl", b"\n" * 100), write(tmp_path, "b.jsonl", b"")]
    assert plan_by_pieces(sources, 30, 5) == Plan((ShardRange(0, 0, 0, 0, 0, 0, 0),), 0)


def test_a_damaged_source_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, "a.parquet", b"PAR1 no")
    with pytest.raises(RefusedError, match=r"a\.parquet"):
        plan_piece(source, PlanPiece(0, 0, 0), 5)


def test_a_job_is_large_by_its_sources_or_the_bytes_to_scan() -> None:
    small, large = (Source("/a.jsonl", size, "1", "jsonl") for size in (1, MAX_INLINE_BYTES + 1))
    parquet = Source("/a.parquet", MAX_INLINE_BYTES * 9, "1", "parquet")
    assert [is_large([small] * 8), is_large([small] * 9), is_large([large])] == [False, True, True]
    assert [is_large([parquet] * 8), is_large([large], limit=5)] == [False, False]
