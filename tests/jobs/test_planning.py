"""Where shards begin and end."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.input.formats import jsonl_scan
from gristmill.jobs.input.formats.parquet import ParquetFormat
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_job_shards, plan_shards
from gristmill.jobs.source import Plan, ShardRange, Source


def write(folder: Path, name: str, data: bytes) -> Source:
    (folder / name).write_bytes(data)
    return load_sources([str(folder / name)])[0]


def write_parquet(folder: Path, name: str, num_rows: int, group: int = 1000) -> Source:
    pq.write_table(pa.table({"x": range(num_rows)}), folder / name, row_group_size=group)
    return load_sources([str(folder / name)])[0]


def sizes(plan: Plan) -> list[tuple[int, int, int]]:
    return [(shard.source_index, shard.first_row, shard.num_rows) for shard in plan.shards]


def test_blank_lines_count_in_the_index_but_are_no_rows(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", b'{"a":1}\n\n  \t\r\n{"a":2}\nbad\n\n')
    assert plan_shards([source], 2).shards == (
        ShardRange(0, 0, first_row=0, num_rows=2, num_records=4, byte_offset=0, byte_size=22),
        ShardRange(1, 0, first_row=4, num_rows=1, num_records=2, byte_offset=22, byte_size=5),
    )


def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    assert plan_shards([write(tmp_path, "a.jsonl", b"{}\n{}")]).num_rows == 2
    assert plan_shards([write(tmp_path, "b.jsonl", b"{}\n  ")]).num_rows == 1


@pytest.mark.parametrize("data", [b"", b"\n\n \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf \n"])
def test_no_rows_is_one_shard_of_none(tmp_path: Path, data: bytes) -> None:
    assert plan_shards([write(tmp_path, "a.jsonl", data)]) == Plan((ShardRange(0, 0, 0, 0, 0, 0, 0),), 0)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plan = plan_shards([write(tmp_path, "a.jsonl", b"\xef\xbb\xbf\n{}\n")])
    assert (plan.num_rows, plan.shards[0].num_records) == (1, 2)


def test_a_shard_is_within_one_source(tmp_path: Path) -> None:
    sources = [
        write(tmp_path, "a.jsonl", b"{}\n" * 5),
        write(tmp_path, "b.jsonl", b"\n"),
        write_parquet(tmp_path, "c.parquet", 7, group=3),
    ]
    plan = plan_shards(sources, 4)
    assert sizes(plan) == [(0, 0, 4), (0, 4, 1), (2, 0, 4), (2, 4, 3)]
    assert [shard.shard_index for shard in plan.shards] == [0, 1, 2, 3]
    assert plan.num_rows == 12


def test_an_unlearned_job_begins_with_small_shards(tmp_path: Path) -> None:
    plan = plan_shards([write_parquet(tmp_path, "a.parquet", 5000)])
    assert [shard.num_rows for shard in plan.shards] == [64, 128, 256, 512, 1024, 1024, 1024, 968]


@pytest.mark.parametrize(("rows_per_s", "expected"), [(0.1, 64), (10.0, 300), (1e9, 65536)])
def test_a_learned_rate_gives_30_seconds_of_work(tmp_path: Path, rows_per_s: float, expected: int) -> None:
    source = write_parquet(tmp_path, "a.parquet", 70_000, group=70_000)
    assert plan_shards([source], rows_per_s=rows_per_s).shards[0].num_rows == expected
    assert plan_shards([source], 10, rows_per_s).shards[0].num_rows == 10


@pytest.mark.parametrize(("limit", "expected"), [
    (1, [(0, 0, 1)]),
    (4, [(0, 0, 2), (0, 3, 1), (1, 0, 1)]),
    (5, [(0, 0, 2), (0, 3, 1), (1, 0, 2)]),
    (99, [(0, 0, 2), (0, 3, 1), (1, 0, 2), (1, 2, 2)]),
])  # fmt: skip
def test_a_limit_counts_rows_over_the_sources(
    tmp_path: Path, limit: int, expected: list[tuple[int, int, int]]
) -> None:
    sources = [write(tmp_path, "a.jsonl", b"1\n\n2\n\n3\n\n"), write_parquet(tmp_path, "b.parquet", 4)]
    plan = plan_shards(sources, 2, limit=limit)
    assert sizes(plan) == expected
    assert plan.num_rows == min(limit, 7)


def test_what_lies_after_the_limit_is_not_read(tmp_path: Path) -> None:
    sources = [write(tmp_path, "a.jsonl", b"{}\n" * 10), write(tmp_path, "b.parquet", b"not parquet")]
    assert plan_shards(sources, limit=10).num_rows == 10


@pytest.mark.parametrize("scan_bytes", [1, 2, 3, 7, 4096])
def test_chunk_borders_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scan_bytes: int
) -> None:
    data = b'{"a":1}\r\n\r\n   \n{"b"\n' + b" " * 20 + b"\n" + b" " * 20 + b"x\n\n\nlast"
    source = write(tmp_path, "a.jsonl", data)
    whole = plan_shards([source], 2)
    monkeypatch.setattr(jsonl_scan, "_SCAN_BYTES", scan_bytes)
    assert plan_shards([source], 2) == whole
    assert whole.num_rows == 4 and sum(shard.byte_size for shard in whole.shards) == len(data)


def test_compressed_files_of_several_parts_are_read_whole(tmp_path: Path) -> None:
    frames = zstandard.compress(b"{}\n") + b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstandard.compress(b"{}\n{}\n")
    members = gzip.compress(b"{}\n") + gzip.compress(b"{}\n{}\n")
    for source in (write(tmp_path, "a.jsonl.zst", frames), write(tmp_path, "b.jsonl.gz", members)):
        assert (plan_shards([source]).num_rows, plan_shards([source]).shards[0].byte_size) == (3, 9)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_refused(tmp_path: Path, name: str) -> None:
    text = b"".join(b'{"n": %d}\n' % n for n in range(9999))
    if name.endswith("parquet"):
        data = write_parquet(tmp_path, "whole.parquet", 9999)
        content = Path(data.uri).read_bytes()
    else:
        content = gzip.compress(text) if name.endswith("gz") else zstandard.compress(text)
    with pytest.raises(RefusedError, match=name):
        plan_shards([write(tmp_path, name, content[:-20])])


def test_planning_reads_a_parquet_footer_only(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, "a.parquet", 10)
    path = Path(source.uri)
    data = bytearray(path.read_bytes())
    data[4:20] = b"\xff" * 16
    path.write_bytes(data)
    assert ParquetFormat().count_rows(source) == 10


@pytest.mark.parametrize("is_parquet", [False, True])
def test_large_rows_that_are_kept_make_small_shards(tmp_path: Path, is_parquet: bool) -> None:
    if is_parquet:
        pq.write_table(pa.table({"x": ["x" * 100] * 300}), tmp_path / "a.parquet", use_dictionary=False)
        sources = load_sources([str(tmp_path / "a.parquet")])
    else:
        sources = [write(tmp_path, "a.jsonl", (b'{"x": "' + b"x" * 92 + b'"}\n') * 300)]

    def largest(shard_rows: int | None = None, keeps_columns: bool = True) -> int:
        plan = plan_job_shards(
            sources, shard_rows, 5.0, None, keeps_columns=keeps_columns, max_kept_bytes=3000
        )
        assert plan.num_rows == 300
        return max(shard.num_rows for shard in plan.shards)

    assert largest(keeps_columns=False) == 150
    assert 25 <= largest() <= 29
    assert largest(shard_rows=100) == 100


def test_many_footers_are_read_at_once_and_in_order(tmp_path: Path) -> None:
    sources = [write_parquet(tmp_path, f"{n:02}.parquet", n) for n in range(40)]
    plan = plan_shards(sources, 1000)
    assert sizes(plan) == [(n, 0, n) for n in range(1, 40)]
    (tmp_path / "17.parquet").write_bytes(b"PAR1")
    with pytest.raises(RefusedError, match=r"17\.parquet"):
        plan_shards(sources)


def test_a_million_rows_of_jsonl_are_planned_in_a_fraction_of_a_second(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", (b'{"text": "' + b"x" * 88 + b'"}\n') * 1_000_000)
    begin = time.process_time()
    assert plan_shards([source]).num_rows == 1_000_000
    assert time.process_time() - begin < 1.0
