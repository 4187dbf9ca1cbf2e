"""How a part lies in a file: Parquet or JSON lines, in row order, merged with an earlier file in a stream."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gristmill.jobs.output.schema import holds_json, kept_fields
from gristmill.jobs.results import Result
from gristmill.jobs.source import Source
from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.values import to_json_text, to_plain

MAX_GROUP_ROWS = 16_384
MAX_GROUP_BYTES = 64 << 20
_ROW_BITS = 41  # of a row_index, in a number that also holds the source_index
TOKEN_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens")
# error_code and error_message are the last columns, so a line of a completion ends with exactly this.
_NO_ERROR_TAIL = b'"error_code": null, "error_message": null}\n'


class PartRows(NamedTuple):
    """What a part file says of itself."""

    rows: int
    errors: int


@dataclass(slots=True)
class StrippedRows:
    """What a part lost when its error rows were left out. Mutable while counting."""

    num_kept: int = 0
    errors_by_code: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_COLUMNS, 0))

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Counts error rows."""
        for row in rows:
            code = row["error_code"]
            self.errors_by_code[code] = self.errors_by_code.get(code, 0) + 1
            for name in TOKEN_COLUMNS:
                self.tokens[name] += row[name] or 0


def build_table(results: Sequence[Result], schema: pa.Schema, sources: Sequence[Source]) -> pa.Table:
    """The results as a table of `schema`, in the order given."""
    kept = {field.name: index for index, field in enumerate(kept_fields(schema))}
    arrays: list[pa.Array] = []
    for column in schema:
        if column.name == "source":
            values: list[Any] = [sources[result.source_index].uri for result in results]
        elif column.name in kept:
            values = _kept_values(results, kept[column.name], column)
        else:
            values = [getattr(result, column.name) for result in results]
        arrays.append(_build_array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def write_parquet(
    file: HashingFile,
    results: Sequence[Result],
    earlier: BinaryIO | None,
    schema: pa.Schema,
    sources: Sequence[Source],
) -> int:
    """Writes `results` (in row order) merged with the earlier part; returns the number of rows."""
    num_rows = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in _merge_tables(earlier, build_table(results, schema, sources), sources):
            _write_groups(writer, table)
            num_rows += table.num_rows
        if num_rows == 0:
            writer.write_table(schema.empty_table())
    return num_rows


def write_jsonl(
    file: HashingFile,
    results: Sequence[Result],
    earlier: BinaryIO | None,
    schema: pa.Schema,
    sources: Sequence[Source],
) -> int:
    """The same as JSON lines, one object a line, keys in the schema's order."""
    num_rows, last = 0, ("", -1)
    lines = heapq.merge(_read_lines(earlier or ()), _build_lines(results, schema, sources))
    for key, line in lines:
        assert key > last, f"row {key[1]} is in the earlier part and in the new rows"
        file.write(line)
        num_rows, last = num_rows + 1, key
    return num_rows


def strip_parquet(file: HashingFile, earlier: BinaryIO, schema: pa.Schema) -> StrippedRows:
    """Writes the earlier part without its error rows; says what was left out."""
    stripped = StrippedRows()
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _read_batches(earlier):
            table = pa.Table.from_batches([batch]).cast(schema)
            is_error = pc.is_valid(table.column("error_code"))
            stripped.add(table.filter(is_error).select(["error_code", *TOKEN_COLUMNS]).to_pylist())
            kept = table.filter(pc.invert(is_error))
            stripped.num_kept += kept.num_rows
            if kept.num_rows:
                _write_groups(writer, kept)
        if stripped.num_kept == 0:
            writer.write_table(schema.empty_table())
    return stripped


def strip_jsonl(file: HashingFile, earlier: BinaryIO, schema: pa.Schema) -> StrippedRows:
    """The same for JSON lines."""
    stripped = StrippedRows()
    for line in earlier:
        if line.endswith(_NO_ERROR_TAIL):
            file.write(line)
            stripped.num_kept += 1
        else:
            stripped.add([json.loads(line)])
    return stripped


def load_parquet_keys(part: BinaryIO, only_errors: bool) -> Iterator[tuple[str, int]]:
    """(source, row_index) of every row, or of every error row."""
    with pq.ParquetFile(part) as file:
        for batch in file.iter_batches(columns=["source", "row_index", "error_code"]):
            if only_errors:
                batch = batch.filter(pc.is_valid(batch.column("error_code")))
            yield from zip(
                batch.column("source").to_pylist(), batch.column("row_index").to_pylist(), strict=True
            )


def load_jsonl_keys(part: BinaryIO, only_errors: bool) -> Iterator[tuple[str, int]]:
    """(source, row_index) of every line, or of every line of an error."""
    lines = (line for line in part if not (only_errors and line.endswith(_NO_ERROR_TAIL)))
    return (key for key, _ in _read_lines(lines))


def count_parquet(part: BinaryIO) -> PartRows:
    """Rows and error rows by the footer; of a row group without statistics the column is read."""
    errors = 0
    with pq.ParquetFile(part) as file:
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


def count_jsonl(part: BinaryIO) -> PartRows:
    """Rows and error rows by the ends of the lines."""
    rows = completions = 0
    for line in part:
        rows += 1
        completions += line.endswith(_NO_ERROR_TAIL)
    return PartRows(rows, rows - completions)


def _write_groups(writer: pq.ParquetWriter, table: pa.Table) -> None:
    group_rows = max(1, min(MAX_GROUP_ROWS, MAX_GROUP_BYTES * table.num_rows // max(table.nbytes, 1)))
    writer.write_table(table, row_group_size=group_rows)


def _merge_tables(earlier: BinaryIO | None, new: pa.Table, sources: Sequence[Source]) -> Iterator[pa.Table]:
    """The earlier part's batches and the new rows in row order; holds the new rows and a batch at a time."""
    uris = pa.array([source.uri for source in sources], pa.string())
    new_keys = _row_keys(new, uris)
    start, last = 0, -1
    for batch in _read_batches(earlier):
        old = pa.Table.from_batches([batch]).cast(new.schema)
        old_keys = _row_keys(old, uris)
        end = int(np.searchsorted(new_keys, old_keys[-1], side="right"))
        keys = np.concatenate([old_keys, new_keys[start:end]])
        order = np.argsort(keys)
        last = _check_order(keys[order], last)
        yield pa.concat_tables([old, new.slice(start, end - start)]).take(pa.array(order))
        start = end
    _check_order(new_keys[start:], last)
    if start < new.num_rows:
        yield new.slice(start)


def _row_keys(table: pa.Table, uris: pa.Array) -> NDArray[np.int64]:
    """A number for each row that grows with its source, then with its row_index."""
    source_index = pc.fill_null(pc.index_in(table.column("source"), uris), -1).to_numpy()
    keys: NDArray[np.int64] = (
        source_index.astype(np.int64) << _ROW_BITS | table.column("row_index").to_numpy()
    )
    return keys


def _check_order(keys: NDArray[np.int64], last: int) -> int:
    steps = np.diff(keys, prepend=last)
    if not (steps > 0).all():
        row_index = int(keys[steps <= 0][0]) & (1 << _ROW_BITS) - 1
        raise AssertionError(f"row {row_index} is out of order or twice in a part")
    return int(keys[-1]) if len(keys) else last


def _read_batches(part: BinaryIO | None) -> Iterator[pa.RecordBatch]:
    if part is None:
        return
    with pq.ParquetFile(part) as file:
        for batch in file.iter_batches(batch_size=MAX_GROUP_ROWS):
            if batch.num_rows:
                yield batch


def _read_lines(lines: Iterable[bytes]) -> Iterator[tuple[tuple[str, int], bytes]]:
    for line in lines:
        record = json.loads(line)
        yield (record["source"], record["row_index"]), line


def _build_lines(
    results: Iterable[Result], schema: pa.Schema, sources: Sequence[Source]
) -> Iterator[tuple[tuple[str, int], bytes]]:
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
        line = _encode(json.dumps(record, ensure_ascii=False, allow_nan=False)) + b"\n"
        yield (record["source"], result.row_index), line


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
