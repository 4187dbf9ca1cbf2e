"""Parts as Parquet, compressed with zstd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gristmill.jobs.output.formats.base import TOKEN_COLUMNS, OutputFormat, PartRows, StrippedRows
from gristmill.jobs.output.schema import holds_json, kept_fields
from gristmill.jobs.results import Result
from gristmill.jobs.source import Source
from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.values import encode_text, to_json_text

MAX_GROUP_ROWS = 16_384
MAX_GROUP_BYTES = 64 << 20
_ROW_BITS = 41  # of a row_index, in a number that also holds the source_index


class ParquetParts(OutputFormat):
    """Row groups of bounded size; a footer counts rows and, by its statistics, error rows."""

    name = "parquet"
    dataset_format = "parquet"
    has_footer = True

    def write(
        self,
        file: HashingFile,
        results: Sequence[Result],
        earlier: BinaryIO | None,
        schema: pa.Schema,
        sources: Sequence[Source],
    ) -> int:
        num_rows = 0
        with pq.ParquetWriter(file, schema, compression="zstd") as writer:
            for table in _merge_tables(earlier, build_table(results, schema, sources), sources):
                _write_groups(writer, table)
                num_rows += table.num_rows
            if num_rows == 0:
                writer.write_table(schema.empty_table())
        return num_rows

    def strip(self, file: HashingFile, earlier: BinaryIO, schema: pa.Schema) -> StrippedRows:
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

    def load_keys(self, part: BinaryIO, only_errors: bool) -> Iterator[tuple[str, int]]:
        with pq.ParquetFile(part) as file:
            for batch in file.iter_batches(columns=["source", "row_index", "error_code"]):
                if only_errors:
                    batch = batch.filter(pc.is_valid(batch.column("error_code")))
                yield from zip(
                    batch.column("source").to_pylist(), batch.column("row_index").to_pylist(), strict=True
                )

    def count(self, part: BinaryIO) -> PartRows:
        errors = 0
        with pq.ParquetFile(part) as file:
            column = file.schema_arrow.names.index("error_code")
            metadata = file.metadata
            leaf = next(
                i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "error_code"
            )
            for group in range(metadata.num_row_groups):
                statistics = metadata.row_group(group).column(leaf).statistics
                if statistics is not None and statistics.has_null_count:
                    errors += metadata.row_group(group).num_rows - statistics.null_count
                else:
                    table = file.read_row_group(group, columns=[file.schema_arrow.names[column]])
                    errors += table.num_rows - table.column(0).null_count
            return PartRows(metadata.num_rows, errors)


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


def _kept_values(results: Sequence[Result], index: int, field: pa.Field) -> list[Any]:
    values = [result.kept[index] if index < len(result.kept) else None for result in results]
    if holds_json(field):
        return [None if value is None else to_json_text(value) for value in values]
    return values


def _build_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except UnicodeEncodeError:
        return pa.array([encode_text(v).decode() if isinstance(v, str) else v for v in values], type=kind)


FORMAT = ParquetParts()
