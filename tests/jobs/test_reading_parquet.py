"""Parquet rows: every usual type as a Python value, any row groups, any cut."""

from __future__ import annotations

import tempfile
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input.formats import parquet
from gristmill.jobs.input.reading import load_columns, load_rows
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.prompt.template import PromptTemplate
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Source

NS = 1_600_000_000_123_456_789
INSTANT = datetime(2020, 9, 13, 12, 26, 40, 123456)


def write(folder: Path, table: Any, name: str = "t.parquet", **options: Any) -> Source:
    pq.write_table(table, folder / name, **options)
    return load_sources([str(folder / name)])[0]


def read(source: Source, columns: list[str], shard_rows: int | None = None) -> list[Row]:
    plan = plan_shards([source], shard_rows)
    return [row for shard in plan.shards for batch in load_rows(source, shard, columns) for row in batch]


COLUMNS: list[tuple[str, Any, Any]] = [
    ("string", pa.array(["é", None]), "é"),
    ("large_string", pa.array(["x", None], pa.large_string()), "x"),
    ("dictionary", pa.array(["x", None]).dictionary_encode(), "x"),
    ("dictionary of numbers", pa.array([7, None]).dictionary_encode(), 7),
    ("int8", pa.array([-1, None], pa.int8()), -1),
    ("uint64", pa.array([2**64 - 1, None], pa.uint64()), 2**64 - 1),
    ("float16", pa.array([0.5, None], pa.float16()), 0.5),
    ("float32", pa.array([0.1, None], pa.float32()), 0.1),
    ("float64", pa.array([0.1, None]), 0.1),
    ("bool", pa.array([True, None]), True),
    ("date32", pa.array([date(2020, 1, 2), None]), date(2020, 1, 2)),
    ("date64", pa.array([date(2020, 1, 2), None], pa.date64()), date(2020, 1, 2)),
    ("timestamp ms", pa.array([1000, None], pa.timestamp("ms")), datetime(1970, 1, 1, 0, 0, 1)),
    ("timestamp ns", pa.array([NS, None], pa.timestamp("ns")), INSTANT),
    ("timestamp utc", pa.array([NS, None], pa.timestamp("ns", "UTC")), INSTANT.replace(tzinfo=UTC)),
    ("time ns", pa.array([1_500_000_001, None], pa.time64("ns")), time(0, 0, 1, 500000)),
    ("duration", pa.array([1_500_000_001, None], pa.duration("ns")), timedelta(seconds=1.5)),
    ("decimal", pa.array([Decimal("1.50"), None]), Decimal("1.50")),
    ("list", pa.array([["a", None], None]), ["a", None]),
    ("list of ns", pa.array([[NS], None], pa.list_(pa.timestamp("ns"))), [INSTANT]),
    ("fixed list", pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), [1, 2]),
    ("struct", pa.array([{"a": 1, "b": None}, None]), {"a": 1, "b": None}),
    ("struct of ns", pa.array([{"t": NS}, None], pa.struct([("t", pa.timestamp("ns"))])), {"t": INSTANT}),
    ("map", pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())), [("k", 1)]),
    ("binary", pa.array([b"\xff", None]), b"\xff"),
    ("null", pa.nulls(2), None),
    ("dotted.name", pa.array([3, None]), 3),
]


@pytest.mark.parametrize(("name", "array", "expected"), COLUMNS, ids=[name for name, _, _ in COLUMNS])
def test_a_column_gives_python_values(tmp_path: Path, name: str, array: Any, expected: Any) -> None:
    rows = read(write(tmp_path, pa.table({name: array, "other": [1, 2]})), [name])
    assert [row.values for row in rows] == [{name: expected}, {name: None}]


def test_every_type_can_be_printed(tmp_path: Path) -> None:
    names = [name for name, _, value in COLUMNS if value is not None and name != "binary"]
    source = write(tmp_path, pa.table({name: array for name, array, _ in COLUMNS}))
    template = PromptTemplate(" ".join(f"{{{{ row['{name}'] }}}}" for name in names))
    assert template.columns <= set(load_columns([source]))
    text = template.render(read(source, names)[0].values or {})
    assert "None" not in text and "nan" not in text and " 0.1 0.1 True 2020-01-02 " in text


def test_the_custom_id_is_read_with_any_columns(tmp_path: Path) -> None:
    rows = read(write(tmp_path, pa.table({"custom_id": [7, 8], "a": [1, 2], "b": [1, 2]})), ["a", "nope"])
    assert [row.values for row in rows] == [{"a": 1, "custom_id": 7}, {"a": 2, "custom_id": 8}]
    assert rows[0].custom_id == "7"


def test_a_template_without_columns_still_has_its_rows(tmp_path: Path) -> None:
    rows = read(write(tmp_path, pa.table({"a": range(1000)})), [])
    assert [row.row_index for row in rows] == list(range(1000))
    assert rows[0].values == {}


def test_a_value_that_python_can_not_hold_fails_its_row_only(tmp_path: Path) -> None:
    table = pa.table({
        "when": pa.array([0, 2**60, 0], pa.timestamp("ms")),
        "text": pa.array([b"ok", b"fine", b"\xff\xfe"]).view(pa.string()),
    })  # fmt: skip
    rows = read(write(tmp_path, table), ["when", "text"])
    assert [row.error.code if row.error else "" for row in rows] == ["", "wrong_type", "invalid_utf8"]
    assert rows[0].values == {"when": datetime(1970, 1, 1), "text": "ok"}
    assert (
        rows[2].error is not None
        and rows[2].error.message == "t.parquet row 2: column 'text' is not valid UTF-8"
    )


def test_a_value_over_the_limit_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_VALUE_BYTES", 1000)
    rows = read(write(tmp_path, pa.table({"a": ["x" * 1000, "x" * 1001, "y"]})), ["a"])
    assert [row.error.code if row.error else "" for row in rows] == ["", "line_too_long", ""]


def test_a_small_file_that_expands_to_much_is_read_in_small_batches(tmp_path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), pa.array(["x" * 1_000_000]))
    source = write(tmp_path, pa.table({"a": text}), store_schema=False)
    assert source.size_bytes < 100_000
    shard = plan_shards([source], 400).shards[0]
    num_rows = 0
    for batch in load_rows(source, shard, ["a"]):
        assert len(batch) <= 9
        num_rows += len(batch)
        if num_rows > 150:
            break
    assert pa.total_allocated_bytes() < 300 << 20


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 700),
    group=st.sampled_from([1, 3, 100, 1000]),
    shard_rows=st.integers(1, 300),
    limit=st.one_of(st.none(), st.integers(1, 800)),
)
def test_any_row_groups_read_the_same_in_any_shards(
    num_rows: int, group: int, shard_rows: int, limit: int | None
) -> None:
    if group == 1:
        num_rows = num_rows % 50
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table(
            {"n": pa.array(range(num_rows), pa.int64()), "t": [f"t{n}" for n in range(num_rows)]}
        )
        source = write(Path(folder), table, row_group_size=group)
        plan = plan_shards([source], shard_rows, limit=limit)
        rows = [r for shard in plan.shards for batch in load_rows(source, shard, ["t"]) for r in batch]
        assert len(rows) == plan.num_rows == min(num_rows, limit or num_rows)
        assert [(row.row_index, row.values) for row in rows] == [
            (n, {"t": f"t{n}"}) for n in range(len(rows))
        ]
        for shard in reversed(plan.shards):
            again = [row for batch in load_rows(source, shard, ["t"]) for row in batch]
            assert again == rows[shard.first_row : shard.first_row + shard.num_rows]


def test_reading_on_does_not_open_the_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, pa.table({"n": range(10_000)}), row_group_size=10_000)
    opened = []

    def count(file: Any) -> Any:
        opened.append(file)
        return pq.ParquetFile(file)

    monkeypatch.setattr(parquet, "_open_file", count)
    assert [row.values for row in read(source, ["n"], 500)] == [{"n": n} for n in range(10_000)]
    assert len(opened) == 2, "once to plan, once to read all shards"


def test_files_of_one_job_may_differ_in_their_columns(tmp_path: Path) -> None:
    first = write(tmp_path, pa.table({"a": [1], "b": ["x"]}), "1.parquet")
    second = write(tmp_path, pa.table({"a": pa.array([1.5]), "c": [True]}), "2.parquet")
    third = write(tmp_path, pa.table({"a": ["text"]}), "3.parquet")
    columns = load_columns([first, second])
    assert columns == {"a": pa.float64(), "b": pa.string(), "c": pa.bool_()}
    assert load_columns([first, second, third])["a"] is None
    assert read(second, ["b", "c"])[0].values == {"c": True}


def test_a_column_that_jsonl_also_has_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    sources = [write(tmp_path, pa.table({"a": [1], "b": [1]})), *load_sources([str(tmp_path / "a.jsonl")])]
    assert load_columns(sources) == {"a": None, "b": pa.int64()}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(RefusedError, match="several columns named 'a'"):
        load_columns([write(tmp_path, table)])


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 is not enough PAR1")
    with pytest.raises(RefusedError, match=r"x\.parquet"):
        load_columns(load_sources([str(tmp_path / "x.parquet")]))


def test_damaged_data_behind_a_good_footer_fails_the_shard(tmp_path: Path) -> None:
    source = write(tmp_path, pa.table({"a": [f"text {n}" for n in range(10_000)]}), use_dictionary=False)
    data = bytearray(Path(source.uri).read_bytes())
    data[4:200] = b"\xff" * 196
    Path(source.uri).write_bytes(data)
    source = load_sources([source.uri])[0]
    shard = plan_shards([source], 100).shards[0]
    with pytest.raises(SourceError, match=r"t\.parquet"):
        list(load_rows(source, shard, ["a"]))
