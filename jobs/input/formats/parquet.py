"""Rows of a Parquet source: one range of rows at a time, only the columns that are needed, in small batches.

Nothing here depends on row groups: a range may begin and end anywhere, and a group may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input.cursors import CursorCache
from gristmill.jobs.input.files import expect_ranges, open_input, refuse_unreadable
from gristmill.jobs.input.formats.base import InputFormat
from gristmill.jobs.row_errors import RowError
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source

MAX_VALUE_BYTES = 16 << 20
_PARQUET_ERRORS = (pa.ArrowException, OSError)
_STREAM_BYTES = 1 << 20
_DECODE_ROWS = 128  # a batch that Arrow decodes at once: a tiny file can expand to gigabytes
_BATCH_BYTES = 8 << 20
_VALUE_ERRORS = (pa.ArrowException, ValueError, OverflowError, KeyError)  # KeyError: an unknown time zone


class ParquetFormat(InputFormat):
    """Parquet: rows and types are known from the footer; only the columns that are needed are read."""

    name = "parquet"
    suffixes = (".parquet",)
    is_scanned = False
    max_windows = 8  # each decodes its row group up to its first row

    def load_columns(self, source: Source, num_records: int) -> dict[str, Any]:
        with _open_parquet(source) as file:
            schema = file.schema_arrow
        if len(set(schema.names)) != len(schema.names):
            twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
            raise RefusedError(f"{source.uri!r} has several columns named {twice[0]!r}; rename them")
        return dict(zip(schema.names, schema.types, strict=True))

    def load_rows(self, source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
        return _load_rows(source, shard, {*columns, "custom_id"})

    def count_rows(self, source: Source) -> int:
        with _open_parquet(source) as file:
            return int(file.metadata.num_rows)

    def load_row_bytes(self, source: Source) -> float:
        with _open_parquet(source) as file:
            metadata = file.metadata
            num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
            return float(num_bytes / max(1, metadata.num_rows))


@contextmanager
def _open_parquet(source: Source) -> Iterator[Any]:
    """An open ParquetFile: its footer is read. RefusedError when that can't be done."""
    try:
        with open_input(source.uri, source.version, source.size_bytes) as file:
            yield _open_file(file)
    except _PARQUET_ERRORS as error:
        raise RefusedError(
            f"can't read {source.uri!r} as Parquet: {error}; replace the damaged file"
        ) from None
    except SourceError as error:
        raise refuse_unreadable(error) from None


def _open_file(file: Any) -> Any:
    """A ParquetFile that streams its columns instead of holding a row group."""
    return pq.ParquetFile(file, buffer_size=_STREAM_BYTES, pre_buffer=False, coerce_int96_timestamp_unit="us")


def _load_rows(source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
    names = tuple(sorted(columns))
    key = (source.uri, source.version, names)
    cursor = _cursors.take((*key, shard.first_row))
    if cursor is None:
        cursor = ParquetCursor(source, names)
    finished = False
    try:
        cursor.move_to(shard.first_row)
        end = shard.first_row + shard.num_rows
        while cursor.position < end:
            first = cursor.position
            batch = cursor.read(end - first)
            yield _build_rows(source, shard.source_index, first, batch)
        finished = True
    finally:
        if finished and not cursor.is_at_end:
            _cursors.keep((*key, cursor.position), cursor)
        else:
            cursor.close()


class ParquetCursor:
    """An open Parquet file at some row; it reads forward."""

    def __init__(self, source: Source, columns: Collection[str]) -> None:
        self._source = source
        self.position = 0
        self._batch: Any = None  # decoded and not yet returned
        self._batches: Iterator[Any] = iter(())
        self._input: Any = open_input(source.uri, source.version, source.size_bytes)
        self._file: Any = self._try(lambda: _open_file(self._input))
        self._columns = [name for name in self._file.schema_arrow.names if name in columns]
        self._started = False

    @property
    def is_at_end(self) -> bool:
        """Whether every row was read."""
        return bool(self.position >= self._file.metadata.num_rows)

    def move_to(self, row: int) -> None:
        """Moves forward to `row`; the rows before it in its row group are decoded and dropped."""
        assert row >= self.position
        if not self._started:
            metadata = self._file.metadata
            group = 0
            while (
                group < metadata.num_row_groups and self.position + metadata.row_group(group).num_rows <= row
            ):
                self.position += metadata.row_group(group).num_rows
                group += 1
            expect_ranges(self._input, _iterate_chunks(metadata, group, set(self._columns)))
            self._batches = self._file.iter_batches(
                batch_size=_DECODE_ROWS,
                row_groups=list(range(group, metadata.num_row_groups)),
                columns=self._columns,
                use_threads=False,
            )
            self._started = True
        while self.position < row:
            self.read(row - self.position)

    def read(self, max_rows: int) -> Any:
        """The next record batch, of 1 to `max_rows` rows and about 8 MiB."""
        if self._batch is None or self._batch.num_rows == 0:
            self._batch = self._try(lambda: next(self._batches, None))
            if self._batch is None:
                raise SourceError(
                    f"{self._source.uri!r} changed while it was read; restore it, or start a new job"
                )
        held = self._batch
        num_rows = min(max_rows, held.num_rows, max(1, held.num_rows * _BATCH_BYTES // max(1, held.nbytes)))
        self._batch = held.slice(num_rows)
        self.position += num_rows
        return held.slice(0, num_rows)

    def close(self) -> None:
        """Closes the file."""
        self._batch, self._batches = None, iter(())
        self._file.close(force=True)
        self._input.close()

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except _PARQUET_ERRORS as error:
            name = self._source.uri
            raise SourceError(
                f"can't read {name!r} after row {self.position}: {error}; replace the file"
            ) from None


_cursors: CursorCache[ParquetCursor] = CursorCache(max_cursors=4)


def _iterate_chunks(metadata: Any, first_group: int, columns: Collection[str]) -> Iterator[tuple[int, int]]:
    """Where in the file the chunks of these columns begin and end, from a row group on."""
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    wanted = [n for n, path in enumerate(paths) if path in columns or path.partition(".")[0] in columns]
    for index in range(first_group, metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in wanted:
            chunk = group.column(number)
            begin = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                begin = min(begin, chunk.dictionary_page_offset)
            yield begin, begin + chunk.total_compressed_size


def _build_rows(source: Source, source_index: int, first_row: int, batch: Any) -> list[Row]:
    faults: dict[int, RowError] = {}
    lists = [
        _to_values(source, first_row, name, column, faults)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    names = batch.schema.names
    cells = zip(*lists, strict=True) if lists else iter([()] * batch.num_rows)
    rows = [
        Row(source_index, i, dict(zip(names, values, strict=True)))
        for i, values in enumerate(cells, first_row)
    ]
    for index, error in faults.items():
        rows[index] = Row(source_index, first_row + index, None, error)
    return rows


def _to_values(
    source: Source, first_row: int, name: str, column: Any, faults: dict[int, RowError]
) -> list[Any]:
    """A column's values as Python's. Those that have none are None here, and a RowError in `faults`."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    readable = _readable_type(column.type)
    if column.nbytes > MAX_VALUE_BYTES and _is_text(column.type):
        _find_large(source, first_row, name, column, faults)
    try:
        if pa.types.is_floating(column.type) and column.type.bit_width < 64:
            # By way of its shortest text: 0.1 stays 0.1 and does not become 0.10000000149011612.
            column = column.cast(pa.float32()).cast(pa.string()).cast(pa.float64())
        elif readable != column.type:
            column = column.cast(readable, safe=False)
        return _to_list(column)
    except _VALUE_ERRORS:
        return [_to_value(source, first_row + i, i, name, column[i], faults) for i in range(len(column))]


def _to_list(column: Any) -> list[Any]:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()  # several times to_pylist's speed
        return values
    values = column.to_pylist()
    return values


def _to_value(
    source: Source, row_index: int, index: int, name: str, scalar: Any, faults: dict[int, RowError]
) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        code, what = "invalid_utf8", "is not valid UTF-8"
    except _VALUE_ERRORS:
        code, what = "wrong_type", f"has a value of type {scalar.type} that has no Python value"
    faults.setdefault(index, RowError(code, f"{source.name} row {row_index}: column {name!r} {what}"))
    return None


def _find_large(source: Source, first_row: int, name: str, column: Any, faults: dict[int, RowError]) -> None:
    for index, size in enumerate(pc.binary_length(column).to_pylist()):
        if size is not None and size > MAX_VALUE_BYTES:
            message = f"{source.name} row {first_row + index}: column {name!r} has {size} bytes"
            faults[index] = RowError("line_too_long", f"{message}, the limit is {MAX_VALUE_BYTES}")


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )


def _readable_type(kind: Any) -> Any:
    """The nearest type that Python's own values can hold: datetime has microseconds, no nanoseconds."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_readable_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_readable_type(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_readable_type(kind.value_type)))
    return kind


FORMAT = ParquetFormat()
