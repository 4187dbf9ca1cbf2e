"""Part files: one schema, row order, merging, readers that are not ours, and a disk that is full."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.jobs.errors import OutputError, RefusedError
from gristmill.jobs.output.parts import count_part, settle_part, strip_errors, write_attempt
from gristmill.jobs.output.schema import build_part_schema, holds_json, kept_fields, load_part_schema
from gristmill.jobs.records import PartFile, ShardClaim
from gristmill.jobs.results import SKIPPED, Result
from gristmill.jobs.source import ShardRange, Source
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.storage.hashing_file import HashingFile
from tests.jobs.cases import ELSEWHERE, SCHEMA, SOURCES, build_results, load_done_rows

OTHER = "not_utf8"
FORMATS = pytest.mark.parametrize("output_format", ["parquet", "jsonl"])


@pytest.fixture(params=["local", "s3"])
def any_storage(request: pytest.FixtureRequest, out: Path) -> Storage:
    if request.param == "s3":
        return open_storage(f"{request.getfixturevalue('s3_root')}/out")
    return open_storage(str(out))


def build_claim(part: PartFile | None = None, shard_index: int = 42) -> ShardClaim:
    shard = ShardRange(shard_index, 0, 0, 100, 100, 0, 0)
    return ShardClaim(1, "job_x", 3, 1, ELSEWHERE, shard, part, 0)


def write(
    storage: Storage,
    results: list[Result],
    output_format: str = "parquet",
    part: PartFile | None = None,
    schema: pa.Schema = SCHEMA,
    shard_index: int = 42,
) -> PartFile:
    claim = build_claim(part, shard_index)
    return write_attempt(storage, claim, results, schema, SOURCES, output_format)


def read(storage: Storage, part: PartFile) -> list[dict[str, Any]]:
    data = storage.read(settle_part(storage, part))
    if part.path.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(pa.BufferReader(data)).to_pylist()
        return rows
    return [json.loads(line) for line in data.splitlines()]


@FORMATS
def test_a_part_says_what_lies_in_its_file(storage: Storage, out: Path, output_format: str) -> None:
    part = write(storage, build_results(*range(12)), output_format)
    data = (out / part.attempt).read_bytes()
    assert (part.path, part.rows, part.bytes) == (f"part-00042.{output_format}", 12, len(data))
    assert part.sha256 == hashlib.sha256(data).hexdigest()
    assert part.attempt.startswith("_attempts/00042-3-")
    assert [path.name for path in out.iterdir()] == ["_attempts"]
    assert count_part(storage, part) == (12, 1)


@FORMATS
def test_rows_are_written_in_input_order_with_every_column(any_storage: Storage, output_format: str) -> None:
    rows = read(any_storage, write(any_storage, build_results(2, 9, 0), output_format))
    assert [row["row_index"] for row in rows] == [0, 2, 9]
    assert rows[0] == {
        "source": "/data/tickets.jsonl",
        "row_index": 0,
        "custom_id": "id-0",
        "completion": "tệxt 0",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "error_code": None,
        "error_message": None,
    }
    assert list(rows[0]) == SCHEMA.names
    assert rows[2]["error_code"] == "null_value" and rows[2]["completion"] is None


@FORMATS
def test_a_later_part_holds_the_earlier_rows_in_order(any_storage: Storage, output_format: str) -> None:
    first = write(any_storage, build_results(3, 1, 7), output_format)
    second = write(any_storage, build_results(0, 9, 5), output_format, first)
    third = write(any_storage, [], output_format, second)
    assert (first.rows, second.rows, third.rows) == (3, 6, 6)
    assert [row["row_index"] for row in read(any_storage, third)] == [0, 1, 3, 5, 7, 9]
    assert load_done_rows(any_storage, third) == {0, 1, 3, 5, 7, 9}
    assert count_part(any_storage, third) == (6, 1)


@FORMATS
def test_the_same_row_twice_is_our_bug(storage: Storage, output_format: str) -> None:
    first = write(storage, build_results(1, 2), output_format)
    with pytest.raises(AssertionError, match="row 2"):
        write(storage, build_results(2, 3), output_format, first)
    with pytest.raises(AssertionError, match="row 5"):
        write(storage, build_results(5, 5), output_format)
    assert storage.names("_attempts") == []


@FORMATS
def test_a_part_without_rows_has_its_columns(storage: Storage, out: Path, output_format: str) -> None:
    part = write(storage, [], output_format)
    assert (part.rows, load_done_rows(storage, part), count_part(storage, part)) == (0, set(), (0, 0))
    if output_format == "parquet":
        assert pq.read_schema(out / part.path).names == SCHEMA.names
        assert load_done_rows(storage, write(storage, build_results(4), output_format, part)) == {4}


def test_no_part_means_no_done_rows(storage: Storage) -> None:
    assert load_done_rows(storage, None) == set()


def test_a_long_part_is_merged_in_several_row_groups(
    storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.jobs.output.formats.parquet.MAX_GROUP_ROWS", 100)
    first = write(storage, build_results(*range(0, 1000, 2)))
    second = write(storage, build_results(*range(1, 1000, 2)), part=first)
    assert [row["row_index"] for row in read(storage, second)] == list(range(1000))
    metadata = pq.read_metadata(out / second.path)
    assert metadata.num_row_groups >= 10
    assert metadata.row_group(0).column(0).compression == "ZSTD"


def test_large_rows_make_smaller_row_groups(
    storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.jobs.output.formats.parquet.MAX_GROUP_BYTES", 10_000)
    results = [Result(0, row, completion="x" * 1000) for row in range(50)]
    part = write(storage, results)
    assert pq.read_metadata(out / settle_part(storage, part)).num_row_groups >= 5


@FORMATS
def test_a_part_that_is_not_as_committed_is_an_error(storage: Storage, out: Path, output_format: str) -> None:
    part = write(storage, build_results(1, 2), output_format)
    path = out / settle_part(storage, part)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OutputError, match=r"bytes, not the \d+ that were committed.*--if-exists overwrite"):
        load_done_rows(storage, part)
    path.unlink()
    with pytest.raises(OutputError, match="is missing"):
        write(storage, build_results(3), output_format, part)


def test_kept_parquet_columns_keep_their_types(storage: Storage) -> None:
    columns = {
        "n": pa.int16(),
        "when": pa.timestamp("us", tz="UTC"),
        "day": pa.date32(),
        "tags": pa.list_(pa.string()),
        "nested": pa.struct([("a", pa.int64()), ("error_code", pa.string())]),
        "kind": pa.dictionary(pa.int32(), pa.large_string()),
        "price": pa.decimal128(10, 2),
    }
    schema = build_part_schema(list(columns), columns, are_typed=True)
    assert [field.type for field in kept_fields(schema)] == [
        *list(columns.values())[:5],
        pa.large_string(),
        columns["price"],
    ]
    kept = (
        7,
        datetime(2026, 1, 2, tzinfo=UTC),
        date(2026, 1, 2),
        ["x"],
        {"a": 1, "error_code": None},
        "k",
        Decimal("1.50"),
    )
    results = [Result(0, 0, None, kept, "done"), Result(0, 1, error_code="invalid_json")]
    rows = read(storage, write(storage, results, schema=schema))
    assert tuple(rows[0][name] for name in columns) == kept
    assert [rows[1][name] for name in columns] == [None] * 7
    part = write(storage, results, "jsonl", schema=schema, shard_index=2)
    lines = read(storage, part)
    assert (lines[0]["n"], lines[0]["tags"], lines[0]["when"]) == (7, ["x"], "2026-01-02T00:00:00+00:00")
    assert count_part(storage, part) == (2, 1)


@FORMATS
def test_kept_jsonl_columns_are_json_text(storage: Storage, output_format: str) -> None:
    schema = build_part_schema(["a", "b"], {"a": None, "b": pa.int64()}, are_typed=False)
    assert all(holds_json(field) for field in kept_fields(schema))
    results = [Result(0, 0, None, ({"x": "ệ"}, 5)), Result(0, 1, None, (None, "text"))]
    rows = read(storage, write(storage, results, output_format, schema=schema))
    assert [(row["a"], row["b"]) for row in rows] == [('{"x": "ệ"}', "5"), (None, '"text"')]


@FORMATS
def test_lone_surrogates_are_replaced_not_fatal(storage: Storage, output_format: str) -> None:
    schema = build_part_schema(["a"], {"a": None}, are_typed=False)
    results = [Result(0, 0, "id\ud800", ("\ud800",), error_code="invalid_text", error_message="bad \udfff")]
    (row,) = read(storage, write(storage, results, output_format, schema=schema))
    assert (row["custom_id"], row["error_message"]) == ("id\ufffd", "bad \ufffd")
    assert json.loads(row["a"]) == "\ud800"


def test_a_kept_name_that_the_output_uses_is_refused() -> None:
    with pytest.raises(RefusedError, match="--keep completion"):
        build_part_schema(["completion"], {"completion": None}, are_typed=False)
    with pytest.raises(RefusedError, match="no such column; there are: a, b"):
        build_part_schema(["x"], {"b": None, "a": None}, are_typed=False)


def test_any_kept_column_is_accepted_where_no_row_could_be_read() -> None:
    assert build_part_schema(["anything"], {}, are_typed=False).field("anything").type == pa.string()


def test_a_schema_survives_the_database() -> None:
    schema = build_part_schema(["a"], {"a": None}, are_typed=False)
    again = load_part_schema(schema.serialize().to_pybytes())
    assert again.equals(schema, check_metadata=True)


def test_pandas_pyarrow_and_duckdb_read_the_folder_while_the_job_runs(storage: Storage, out: Path) -> None:
    clean = [replace(result, error_code=None, error_message=None) for result in build_results(*range(5))]
    settle_part(storage, write(storage, clean, shard_index=0))
    settle_part(storage, write(storage, build_results(9, 19), shard_index=1))
    write(storage, build_results(100), shard_index=2)
    storage.put("_manifest.json", b"{}")
    (out / ".part-00003.parquet.0123.tmp").write_bytes(b"half a file")
    expected = [0, 1, 2, 3, 4, 9, 19]
    frame = pd.read_parquet(out)
    assert list(frame["row_index"]) == expected
    assert list(frame["error_code"].dropna()) == ["null_value", "null_value"]
    assert pq.read_table(out)["row_index"].to_pylist() == expected
    query = f"SELECT row_index, error_code FROM '{out}/part-*.parquet' ORDER BY 1"
    with duckdb.connect() as connection:
        assert [row for row, _ in connection.execute(query).fetchall()] == expected


def test_pandas_and_duckdb_read_json_lines_whose_first_part_has_no_errors(
    storage: Storage, out: Path
) -> None:
    clean = [replace(result, error_code=None, error_message=None) for result in build_results(*range(5))]
    settle_part(storage, write(storage, clean, "jsonl", shard_index=0))
    settle_part(storage, write(storage, build_results(9, 19), "jsonl", shard_index=1))
    frame = pd.concat([pd.read_json(path, lines=True) for path in sorted(out.glob("part-*.jsonl"))])
    assert list(frame["row_index"]) == [0, 1, 2, 3, 4, 9, 19]
    with duckdb.connect() as connection:
        query = f"SELECT count(*), count(error_code) FROM '{out}/part-*.jsonl'"
        assert connection.execute(query).fetchone() == (7, 2)


def refuse_after(limit: int, code: int) -> Callable[[HashingFile, bytes], int]:
    """A write method that fails with `code` once more than `limit` bytes were written."""
    plain = HashingFile.write

    def write_or_fail(self: HashingFile, data: bytes) -> int:
        if self.size > limit:
            raise OSError(code, "no room")
        return plain(self, data)

    return write_or_fail


@FORMATS
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_output_error_and_leaves_nothing(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, output_format: str, code: int
) -> None:
    earlier = write(storage, build_results(1), output_format)
    settle_part(storage, earlier)
    monkeypatch.setattr(HashingFile, "write", refuse_after(10, code))
    with pytest.raises(OutputError, match="free space and run the same command again"):
        write(storage, build_results(*range(2, 9)), output_format, earlier)
    assert storage.names("_attempts") == []
    assert load_done_rows(storage, earlier) == {1}


def test_a_skipped_row_is_a_row_without_error(storage: Storage) -> None:
    part = write(storage, [Result(0, 0, finish_reason=SKIPPED)])
    assert count_part(storage, part) == (1, 0)


def test_the_source_of_a_row_is_its_uri(storage: Storage) -> None:
    sources = [*SOURCES, Source("/data/more.parquet", 5, "2", "parquet")]
    part = write_attempt(storage, build_claim(), build_results(0, source_index=1), SCHEMA, sources, "parquet")
    assert read(storage, part)[0]["source"] == "/data/more.parquet"


@FORMATS
def test_the_systems_own_file_size_limit_is_an_output_error(storage: Storage, output_format: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    results = [Result(0, row, completion=f"{row}".zfill(50)[::-1] * (row % 97)) for row in range(2000)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OutputError, match="file size limit reached.*run the same command again"):
            write(storage, results, output_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.names("_attempts") == []


def test_an_error_after_a_thousand_good_rows_fits_the_same_columns(storage: Storage, out: Path) -> None:
    good = [Result(0, row, completion="fine", finish_reason="stop") for row in range(1000)]
    bad = Result(0, 1000, error_code="invalid_json", error_message="line 1001: no JSON")
    first = write(storage, good, shard_index=0)
    settle_part(storage, write(storage, [bad], part=first, shard_index=0))
    settle_part(storage, write(storage, good, shard_index=1))
    table = pq.read_table(out)
    assert table.schema.equals(SCHEMA)
    assert table.column("error_code").drop_null().to_pylist() == ["invalid_json"]


@FORMATS
def test_stripping_leaves_the_error_rows_out_and_says_what_they_were(
    any_storage: Storage, output_format: str
) -> None:
    failed = [
        Result(0, 20, "id-20", (), None, None, 7, 2, 1, OTHER, "no text"),
        Result(0, 21, error_code="null_value"),
        Result(0, 22, finish_reason=SKIPPED),
    ]
    whole = write(any_storage, [*build_results(*range(10)), *failed], output_format)
    claim = replace(build_claim(whole), fence=8)
    part, counts, stats = strip_errors(any_storage, claim, SCHEMA, SOURCES, output_format)
    assert (part.path, part.rows) == (whole.path, 10)
    assert part.attempt.startswith("_attempts/00042-8-")
    assert counts == ShardCounts(0, -3, 0, -7, -2, -1)
    assert stats == JobStats(errors_by_code={"null_value": -2, OTHER: -1})
    assert [row["row_index"] for row in read(any_storage, part)] == [*range(9), 22]
    assert load_done_rows(any_storage, part) == {*range(9), 22}
    assert count_part(any_storage, part) == (10, 0)
    again = write(any_storage, build_results(20, 21), output_format, part)
    assert [row["row_index"] for row in read(any_storage, again)] == [*range(9), 20, 21, 22]


@FORMATS
def test_a_part_of_errors_only_becomes_one_without_rows(storage: Storage, output_format: str) -> None:
    whole = write(storage, build_results(9, 19, 29), output_format)
    part, counts, _ = strip_errors(storage, build_claim(whole), SCHEMA, SOURCES, output_format)
    assert (part.rows, counts.failed, read(storage, part)) == (0, -3, [])
    again = write(storage, build_results(8, 9, 19, 29), output_format, part)
    assert count_part(storage, again) == (4, 3)


def test_stripping_keeps_types_and_row_groups_small(
    storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.jobs.output.formats.parquet.MAX_GROUP_ROWS", 100)
    whole = write(storage, build_results(*range(1000)))
    part, counts, _ = strip_errors(storage, build_claim(whole), SCHEMA, SOURCES, "parquet")
    settle_part(storage, part)
    metadata = pq.read_metadata(out / part.path)
    assert (metadata.num_rows, counts.failed, metadata.num_row_groups >= 10) == (900, -100, True)
    assert pq.read_schema(out / part.path).equals(SCHEMA)


def test_a_late_copy_of_an_older_part_is_healed_by_the_next_to_read_it(s3_root: str) -> None:
    storage = open_storage(f"{s3_root}/out")
    older = write(storage, build_results(1, 2))
    settle_part(storage, older)
    newer = write(storage, build_results(3), part=older)
    settle_part(storage, newer)
    for use in (load_done_rows, count_part, settle_part):
        assert storage.publish(older.attempt, older.path), "a publisher that was paused"
        use(storage, newer)
        assert storage.holds(newer.path, newer.attempt, newer.bytes)
    storage.delete(older.attempt)
    assert not storage.publish(older.attempt, older.path)
    storage.delete(newer.attempt)
    assert load_done_rows(storage, newer) == {1, 2, 3}


def test_a_part_of_other_bytes_but_the_same_size_is_an_error_in_s3(s3_root: str) -> None:
    storage = open_storage(s3_root)
    part = write(storage, build_results(1, 2), "jsonl")
    settle_part(storage, part)
    storage.delete(part.attempt)
    data = storage.read(part.path)
    storage.put(part.path, data.replace(b"id-1", b"id-7"))
    with pytest.raises(OutputError, match="is not what was committed.*--if-exists overwrite"):
        load_done_rows(storage, part)


def test_a_part_that_was_damaged_in_place_is_an_error(storage: Storage, out: Path) -> None:
    part = write(storage, build_results(*range(100)))
    path = out / settle_part(storage, part)
    data = path.read_bytes()
    path.write_bytes(data[:-200] + bytes(192) + data[-8:])
    for use in (load_done_rows, count_part):
        with pytest.raises(OutputError, match="can't be read.*put the file back"):
            use(storage, part)


def test_a_part_whose_footer_arrives_damaged_is_counted_by_its_own_bytes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(storage, build_results(*range(100)))
    shorter = write(storage, build_results(1, 2), shard_index=43)
    good = count_part(storage, part)
    for seen in (b"PAR1 damaged PAR1", storage.read(settle_part(storage, shorter))):
        first = iter([io.BytesIO(seen)])
        with monkeypatch.context() as patch:
            whole = storage.open
            patch.setattr(
                storage, "open", lambda name, first=first, whole=whole: next(first, None) or whole(name)
            )
            assert count_part(storage, part) == good
