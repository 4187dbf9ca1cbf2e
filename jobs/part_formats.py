"""How a part lies in a file: Parquet or JSON lines, in row order, merged with an earlier file in a stream."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.part_schema import holds_json, kept_fields
from jobs.results import Result
from jobs.sources import Source
from jobs.storage import HashingFile
from jobs.values import to_json_text, to_plain

MAX_GROUP_ROWS = 16_384
MAX_GROUP_BYTES = 64 << 20
# error_code and error_message are the last columns, so a line of a completion ends with exactly this.
_NO_ERROR_TAIL = b'"error_code": null, "error_message": null}\n'


class PartRows(NamedTuple):
    """What a part file says of itself."""

    rows: int
    errors: int


def build_table(results: Sequence[Result], schema: pa.Schema, sources: Sequence[Source]) -> pa.Table:
    """The results as a table of `schema`, in the order given."""
    kept = {field.name: index for index, field in enumerate(kept_fields(schema))}
    arrays: list[pa.Array] = []
    for field in schema:
        if field.name == "source":
            values: list[Any] = [sources[result.source_index].uri for result in results]
        elif field.name in kept:
            values = _kept_values(results, kept[field.name], field)
        else:
            values = [getattr(result, field.name) for result in results]
        arrays.append(_build_array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def write_parquet(
    file: HashingFile,
    results: Sequence[Result],
    earlier: Path | None,
    schema: pa.Schema,
    sources: Sequence[Source],
) -> int:
    """Writes `results` (in row order) merged with the earlier part; returns the number of rows."""
    num_rows = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in _merge_tables(earlier, build_table(results, schema, sources)):
            group_rows = max(1, min(MAX_GROUP_ROWS, MAX_GROUP_BYTES * table.num_rows // max(table.nbytes, 1)))
            writer.write_table(table, row_group_size=group_rows)
            num_rows += table.num_rows
        if num_rows == 0:
            writer.write_table(schema.empty_table())
    return num_rows


def write_jsonl(
    file: HashingFile,
    results: Sequence[Result],
    earlier: Path | None,
    schema: pa.Schema,
    sources: Sequence[Source],
) -> int:
    """The same as JSON lines, one object a line, keys in the schema's order."""
    num_rows, last = 0, -1
    lines = heapq.merge(_read_lines(earlier), _build_lines(results, schema, sources))
    for row_index, line in lines:
        assert row_index > last, f"row {row_index} is in the earlier part and in the new rows"
        file.write(line)
        num_rows, last = num_rows + 1, row_index
    return num_rows


def load_parquet_row_indexes(path: Path) -> Iterator[int]:
    """The row_index of every row."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["row_index"]):
            yield from batch.column(0).to_pylist()


def load_jsonl_row_indexes(path: Path) -> Iterator[int]:
    """The row_index of every line."""
    return (row_index for row_index, _ in _read_lines(path))


def count_parquet(path: Path) -> PartRows:
    """Rows and error rows by the footer; of a row group without statistics the column is read."""
    errors = 0
    with pq.ParquetFile(path) as file:
        column = file.schema_arrow.names.index("error_code")
        metadata = file.metadata
        leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "error_code")
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(leaf).statistics
            if statistics is not None and statistics.has_null_count:
                errors += metadata.row_group(group).num_rows - statistics.null_count
            else:
                table = file.read_row_group(group, columns=[file.schema_arrow.names[column]])
                errors += table.num_rows - table.column(0).null_count
        return PartRows(metadata.num_rows, errors)


def count_jsonl(path: Path) -> PartRows:
    """Rows and error rows by the ends of the lines."""
    rows = completions = 0
    with path.open("rb") as file:
        for line in file:
            rows += 1
            completions += line.endswith(_NO_ERROR_TAIL)
    return PartRows(rows, rows - completions)


def _merge_tables(earlier: Path | None, new: pa.Table) -> Iterator[pa.Table]:
    """The earlier part's batches and the new rows in row order; holds the new rows and a batch at a time."""
    new_rows = new.column("row_index").to_numpy()
    start, last = 0, -1
    for batch in _read_batches(earlier):
        end = int(np.searchsorted(new_rows, batch.column("row_index")[-1].as_py(), side="right"))
        table = pa.concat_tables(
            [pa.Table.from_batches([batch]).cast(new.schema), new.slice(start, end - start)]
        )
        table = table.take(pc.sort_indices(table, sort_keys=[("row_index", "ascending")]))
        last = _check_order(table, last)
        yield table
        start = end
    rest = new.slice(start)
    _check_order(rest, last)
    if rest.num_rows:
        yield rest


def _check_order(table: pa.Table, last: int) -> int:
    rows = table.column("row_index").to_numpy()
    steps = np.diff(rows, prepend=last)
    assert (steps > 0).all(), f"row {rows[steps <= 0][0]} is out of order or twice in a part"
    return int(rows[-1]) if len(rows) else last


def _read_batches(path: Path | None) -> Iterator[pa.RecordBatch]:
    if path is None:
        return
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=MAX_GROUP_ROWS):
            if batch.num_rows:
                yield batch


def _read_lines(path: Path | None) -> Iterator[tuple[int, bytes]]:
    if path is None:
        return
    with path.open("rb") as file:
        for line in file:
            yield json.loads(line)["row_index"], line


def _build_lines(
    results: Iterable[Result], schema: pa.Schema, sources: Sequence[Source]
) -> Iterator[tuple[int, bytes]]:
    kept = [(field.name, holds_json(field)) for field in kept_fields(schema)]
    names = schema.names[3 + len(kept) :]
    for result in results:
        record: dict[str, Any] = {
            "source": sources[result.source_index].uri,
            "row_index": result.row_index,
            "custom_id": result.custom_id,
        }
        for index, (name, as_json) in enumerate(kept):
            value = result.kept[index] if index < len(result.kept) else None
            record[name] = to_json_text(value) if as_json and value is not None else to_plain(value)
        for name in names:
            record[name] = getattr(result, name)
        yield result.row_index, _encode(json.dumps(record, ensure_ascii=False, allow_nan=False)) + b"\n"


def _kept_values(results: Sequence[Result], index: int, field: pa.Field) -> list[Any]:
    values = [result.kept[index] if index < len(result.kept) else None for result in results]
    if holds_json(field):
        return [None if value is None else to_json_text(value) for value in values]
    return values


def _build_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        return pa.array([_encode(v).decode() if isinstance(v, str) else v for v in values], type=kind)


def _encode(text: str) -> bytes:
    """UTF-8, with U+FFFD for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
