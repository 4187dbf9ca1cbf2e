"""JSONL rows: faults by line, and the same rows however the file is cut, compressed or read."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input import bytestream, reading
from gristmill.jobs.input.bytestream import ByteStream
from gristmill.jobs.input.formats import jsonl
from gristmill.jobs.input.reading import load_columns, load_rows
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Plan, Source


def write(folder: Path, data: bytes, name: str = "tickets.jsonl") -> Source:
    (folder / name).write_bytes(data)
    return load_sources([str(folder / name)])[0]


def read(source: Source, shard_rows: int | None = None, limit: int | None = None) -> list[Row]:
    plan = plan_shards([source], shard_rows, limit=limit)
    return list(iterate(source, plan))


def iterate(source: Source, plan: Plan) -> Iterator[Row]:
    for shard in plan.shards:
        for batch in load_rows(source, shard, ()):
            assert 0 < len(batch) <= 512
            yield from batch


def facts(rows: list[Row]) -> list[tuple[int, Any, Any]]:
    return [(r.row_index, r.values, (r.error.code, r.error.message) if r.error else None) for r in rows]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b'{"custom_id":', "invalid_json", "not valid JSON"),
        (b"{'a': 1}", "invalid_json", "column 2"),
        (b'{"a": 1} {"b": 2}', "invalid_json", "Extra data"),
        (b'{"a": "\xff"}', "invalid_utf8", "byte 8"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8", "byte 8"),
        (b"[1, 2]", "not_an_object", "a list"),
        (b'"text"', "not_an_object", "a string"),
        (b"null", "not_an_object", "null"),
        (b"12", "not_an_object", "a number"),
        (b'{"a": ' + b"[" * 100_000, "invalid_json", "nested deeper than 100"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "invalid_json", "nested deeper than 100"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", "too many digits"),
        (b"\x00", "invalid_json", "not valid JSON"),
    ],
)
def test_a_bad_line_is_an_error_row_that_names_file_and_line(
    tmp_path: Path, line: bytes, code: str, words: str
) -> None:
    rows = read(write(tmp_path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n'))
    assert [row.values for row in rows] == [{"a": 1}, None, {"a": 2}]
    error = rows[1].error
    assert error is not None and error.code == code
    assert error.message.startswith("tickets.jsonl line 2: ") and words in error.message


def test_blank_lines_shift_the_index_and_give_no_row(tmp_path: Path) -> None:
    rows = read(write(tmp_path, b'{"a":1}\n\n \t \r\n{"a":2}\r\n\n{"a":3}'))
    assert [(row.row_index, row.values) for row in rows] == [(0, {"a": 1}), (3, {"a": 2}), (5, {"a": 3})]


def test_a_byte_order_mark_is_tolerated_at_the_start_only(tmp_path: Path) -> None:
    rows = read(write(tmp_path, b'\xef\xbb\xbf{"a":1}\n\xef\xbb\xbf{"a":2}\n'))
    assert rows[0].values == {"a": 1}
    assert rows[1].error is not None and rows[1].error.code == "invalid_json"


def test_nan_and_infinity_are_null_and_the_last_of_two_keys_wins(tmp_path: Path) -> None:
    row = read(write(tmp_path, b'{"a": NaN, "b": [-Infinity, Infinity], "c": 1, "c": 2}'))[0]
    assert row.values == {"a": None, "b": [None, None], "c": 2}


def test_brackets_in_text_are_not_depth(tmp_path: Path) -> None:
    text = "[{" * 500
    assert read(write(tmp_path, json.dumps({"a": text}).encode()))[0].values == {"a": text}


def test_a_line_over_the_limit_is_one_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", 30)
    fits, over = b'{"a":"%s"}' % (b"x" * 92), b'{"a":"%s"}' % (b"x" * 93)
    rows = read(write(tmp_path, fits + b"\n" + over + b"\n" + b" " * 500 + b'\n{"a":"z"}\n' + over))
    assert [(row.row_index, row.values is not None) for row in rows] == [
        (0, True),
        (1, False),
        (3, True),
        (4, False),
    ]
    error = rows[1].error
    assert error is not None and error.code == "line_too_long"
    assert error.message == "tickets.jsonl line 2: 101 bytes, the limit is 100"


def test_a_line_of_20_mb_is_an_error_row_at_the_real_limit(tmp_path: Path) -> None:
    rows = read(write(tmp_path, b'{"a":1}\n{"a":"' + b"x" * 20_000_000 + b'"}\n{"a":2}\n'))
    assert [row.error.code if row.error else row.values for row in rows] == [
        {"a": 1},
        "line_too_long",
        {"a": 2},
    ]


def test_batches_are_small_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_BATCH_BYTES", 1000)
    source = write(tmp_path, (b'{"a":"%s"}\n' % (b"x" * 400)) * 10)
    shard = plan_shards([source], 10).shards[0]
    assert [len(batch) for batch in load_rows(source, shard, ())] == [3, 3, 3, 1]


LINE = st.one_of(
    st.sampled_from(
        [b"", b" ", b"\r", b"\t \r", b"{", b"[1]", b"\xff", b'\xef\xbb\xbf{"a":0}', b"\x0b\x0c", b" " * 40]
    ),
    st.integers(0, 99).map(lambda n: b'{"n":%d}' % n),
    st.text(max_size=20).map(lambda t: json.dumps({"t": t}).encode() + b"\r"),
)


@settings(max_examples=50, deadline=None)
@given(
    lines=st.lists(LINE, max_size=30),
    newline_at_end=st.booleans(),
    compression=st.sampled_from(["", ".gz", ".zst"]),
    shard_rows=st.integers(1, 12),
    block=st.sampled_from([1, 7, 64, 1 << 20]),
    limit=st.one_of(st.none(), st.integers(1, 35)),
)
def test_any_file_reads_the_same_in_any_shards(
    lines: list[bytes], newline_at_end: bool, compression: str, shard_rows: int, block: int, limit: int | None
) -> None:
    data = b"\n".join(lines) + (b"\n" if newline_at_end else b"")
    records = data.removesuffix(b"\n").split(b"\n")
    expected = []
    for index, line in enumerate(records):
        if index == 0:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            expected.append((index, line))
    half = len(data) // 2
    if compression == ".gz":
        data = gzip.compress(data[:half]) + gzip.compress(data[half:])
    elif compression == ".zst":
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", block)
        patch.setattr(bytestream, "BLOCK_BYTES", block)
        source = write(Path(folder), data, "tickets.jsonl" + compression)
        plan = plan_shards([source], shard_rows, limit=limit)
        rows = list(iterate(source, plan))
        backwards = [
            row for shard in reversed(plan.shards) for batch in load_rows(source, shard, ()) for row in batch
        ]
        assert len(rows) == plan.num_rows == min(len(expected), limit or len(expected))
        for row, (index, line) in zip(rows, expected, strict=False):
            assert row.row_index == index
            try:
                values = json.loads(line.decode())
            except ValueError:
                values = None
            assert row.values == (values if isinstance(values, dict) else None)
        assert sorted(facts(backwards), key=lambda fact: fact[0]) == facts(rows)


def test_reading_on_does_not_decompress_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(30_000))), "a.jsonl.gz")
    opened = []
    original = bytestream.ByteStream.__init__

    def count(self: bytestream.ByteStream, source: Source) -> None:
        opened.append(source)
        original(self, source)

    plan = plan_shards([source], 2000)
    monkeypatch.setattr(bytestream.ByteStream, "__init__", count)
    rows = list(iterate(source, plan))
    assert [row.values for row in rows if row.values] == [{"n": n} for n in range(30_000)]
    assert len(opened) == 1
    list(load_rows(source, plan.shards[3], ()))
    list(load_rows(source, plan.shards[2], ()))
    assert len(opened) == 3


def test_a_reader_that_is_given_up_leaves_no_open_file(tmp_path: Path) -> None:
    source = write(tmp_path, b'{"a":1}\n' * 2000)
    before = len(os.listdir("/proc/self/fd"))
    reader = load_rows(source, plan_shards([source], 2000).shards[0], ())
    next(iter(reader))
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_that_changed_after_planning_is_not_guessed_at(tmp_path: Path) -> None:
    source = write(tmp_path, b'{"a":1}\n' * 10)
    shard = plan_shards([source]).shards[0]
    os.utime(source.uri, ns=(5, 5))
    with pytest.raises(SourceError, match="changed since the job was planned"):
        list(load_rows(source, shard, ()))
    os.unlink(source.uri)
    with pytest.raises(SourceError, match="can't read"):
        list(load_rows(source, shard, ()))


def test_columns_are_the_keys_of_the_first_records(tmp_path: Path) -> None:
    source = write(
        tmp_path, b'\xef\xbb\xbf{"b":1}\nbad\n[]\n\n{"a":1,"b":2}\n' + b"{}\n" * 2000 + b'{"late":1}\n'
    )
    assert load_columns([source]) == {"b": None, "a": None}


def test_columns_are_found_behind_a_first_line_of_megabytes(tmp_path: Path) -> None:
    source = write(tmp_path, json.dumps({"a": "x" * 3_000_000, "b": 1}).encode() + b'\n{"c": 1}\n')
    assert load_columns([source]) == {"a": None, "b": None, "c": None}


def test_readers_kept_open_between_shards_are_few(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for n in range(8):
        source = write(tmp_path, gzip.compress(b"{}\n" * 10), f"{n}.jsonl.gz")
        list(load_rows(source, plan_shards([source], 5).shards[0], ()))
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_columns_of_rows_that_can_not_be_parsed_are_unknown(tmp_path: Path) -> None:
    assert load_columns([write(tmp_path, b"bad\n[]\n")]) == {}
    assert load_columns([write(tmp_path, b"")]) == {}
    with pytest.raises(RefusedError, match="damaged"):
        load_columns([write(tmp_path, gzip.compress(os.urandom(5000))[:-100], "x.jsonl.gz")])


def test_of_many_files_some_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_SAMPLE_SOURCES", 4)
    opened: list[str] = []

    def count(source: Source) -> ByteStream:
        opened.append(source.name)
        return ByteStream(source)

    monkeypatch.setattr(jsonl, "ByteStream", count)
    sources = [write(tmp_path, b'{"a%d": 1}\n' % n, f"{n:02}.jsonl") for n in range(10)]
    assert set(load_columns(sources)) == {"a0", "a3", "a6", "a9"}
    assert sorted(opened) == ["00.jsonl", "03.jsonl", "06.jsonl", "09.jsonl"]
