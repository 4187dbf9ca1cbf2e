"""Rows of a JSONL source: one range of lines at a time, each line a Row or a Row with an error, in bounded
memory.

A record ends at a newline; the last one may lack it. Records of whitespace only count but are no rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from gristmill.jobs.errors import SourceError
from gristmill.jobs.input.bytestream import BLOCK_BYTES, BYTE_ORDER_MARK, ByteStream
from gristmill.jobs.input.cursors import CursorCache
from gristmill.jobs.input.files import refuse_unreadable
from gristmill.jobs.input.formats.base import InputFormat
from gristmill.jobs.input.formats.jsonl_scan import find_record, scan_records
from gristmill.jobs.row_errors import RowError
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source

MAX_LINE_BYTES = 16 << 20
MAX_DEPTH = 100
MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 8 << 20
_SAMPLE_BLOCK_BYTES = 64 << 10

_cursors: CursorCache[ByteStream] = CursorCache(max_cursors=4)
# NaN and the infinities are no JSON; other tools write them for "no value", so they are read as null.
_decode = json.JSONDecoder(parse_constant=lambda name: None).decode


class JsonlFormat(InputFormat):
    """One JSON object a line, plain or compressed."""

    name = "jsonl"
    suffixes = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst")
    is_scanned = True
    scan_records = staticmethod(scan_records)
    find_record = staticmethod(find_record)

    def load_columns(self, source: Source, num_records: int) -> dict[str, Any]:
        try:
            stream = ByteStream(source)
            try:
                return dict.fromkeys(_sample_keys(source.name, stream, num_records))
            finally:
                stream.close()
        except SourceError as error:
            raise refuse_unreadable(error) from None

    def load_rows(self, source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
        return _load_rows(source, shard)


def _load_rows(source: Source, shard: ShardRange) -> Iterator[list[Row]]:
    key = (source.uri, source.version)
    stream = _cursors.take((*key, shard.byte_offset)) if source.compression else None
    if stream is None:
        stream = ByteStream(source)
    finished = False
    try:
        stream.move_to(shard.byte_offset, shard.byte_offset + shard.byte_size)
        num_rows = 0
        lines = iterate_lines(stream, shard.byte_size)
        for batch in _build_batches(source, shard, lines):
            num_rows += len(batch)
            yield batch
        if num_rows != shard.num_rows:
            raise SourceError(f"{source.uri!r} changed while it was read; restore it, or start a new job")
        finished = True
    finally:
        if finished and source.compression:
            _cursors.keep((*key, stream.position), stream)
        else:
            stream.close()


def iterate_lines(
    stream: ByteStream, size: int, block_bytes: int | None = None
) -> Iterator[list[bytes | OverlongLine]]:
    """The next `size` bytes as lists of lines without their newlines; a line over the limit is not kept."""
    partial = _PartialLine()
    while size > 0:
        block = stream.read(min(block_bytes or BLOCK_BYTES, size))
        if not block:
            break
        size -= len(block)
        lines: list[bytes | OverlongLine] = []
        lines.extend(block.split(b"\n"))
        last = lines.pop()
        assert isinstance(last, bytes)
        if lines:
            first = lines[0]
            assert isinstance(first, bytes)
            partial.add(first)
            lines[0] = partial.finish()
            yield lines
        partial.add(last)
    if partial.size:
        yield [partial.finish()]


def parse_record(name: str, row_index: int, line: bytes) -> dict[str, Any]:
    """The object on one line. RowError names the file and the line (1-based)."""
    where = f"{name} line {row_index + 1}"
    try:
        value = _decode(line.decode())
    except UnicodeDecodeError as error:
        raise RowError("invalid_utf8", f"{where}: not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise RowError(
            "invalid_json", f"{where}: not valid JSON: {error.msg} at column {error.colno}"
        ) from None
    except ValueError:
        raise RowError("invalid_json", f"{where}: a number has too many digits") from None
    except RecursionError:
        raise RowError("invalid_json", f"{where}: nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(
            type(value), "a number"
        )
        raise RowError("not_an_object", f"{where}: is {kind}, not an object {{...}}")
    # Depth is limited below Python's own recursion limit, so that what was read can also be written.
    if line.count(b"{") + line.count(b"[") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RowError("invalid_json", f"{where}: nested deeper than {MAX_DEPTH} levels")
    return value


class OverlongLine:
    """A line over MAX_LINE_BYTES; only its size is known."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class _PartialLine:
    """A line put together from blocks; it stops holding bytes once it is over the limit."""

    __slots__ = ("_has_text", "_parts", "size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._has_text = False
        self.size = 0

    def add(self, part: bytes) -> None:
        self.size += len(part)
        self._parts.append(part)
        if self.size > MAX_LINE_BYTES:
            self._has_text = self._has_text or any(held.strip() for held in self._parts)
            self._parts.clear()

    def finish(self) -> bytes | OverlongLine:
        size, self.size = self.size, 0
        line = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        has_text, self._has_text = self._has_text, False
        self._parts.clear()
        if size <= MAX_LINE_BYTES:
            return line
        return OverlongLine(size) if has_text else b""


def _build_batches(
    source: Source, shard: ShardRange, blocks: Iterable[list[bytes | OverlongLine]]
) -> Iterator[list[Row]]:
    batch: list[Row] = []
    batch_bytes = 0
    row_index = shard.first_row - 1
    for lines in blocks:
        for line in lines:
            row_index += 1
            if row_index == 0 and isinstance(line, bytes):
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not isinstance(line, OverlongLine):
                if not line or line.isspace():
                    continue
                batch_bytes += len(line)
            batch.append(_build_row(source, shard.source_index, row_index, line))
            if len(batch) >= MAX_BATCH_ROWS or batch_bytes >= MAX_BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
    if batch:
        yield batch


def _build_row(source: Source, source_index: int, row_index: int, line: bytes | OverlongLine) -> Row:
    try:
        if isinstance(line, OverlongLine):
            raise RowError(
                "line_too_long",
                f"{source.name} line {row_index + 1}: {line.size} bytes, the limit is {MAX_LINE_BYTES}",
            )
        return Row(source_index, row_index, parse_record(source.name, row_index, line))
    except RowError as error:
        return Row(source_index, row_index, None, error.with_traceback(None))


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    while level and depth >= 0:
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        depth -= 1
    return bool(level)


def _sample_keys(name: str, stream: ByteStream, num_records: int) -> dict[str, None]:
    """Keys of the first records; reads on after 1 MiB only while it has found none."""
    keys: dict[str, None] = {}
    row_index = 0
    for lines in iterate_lines(stream, MAX_LINE_BYTES + BLOCK_BYTES, _SAMPLE_BLOCK_BYTES):
        for line in lines[: num_records - row_index]:
            if not isinstance(line, OverlongLine):
                try:
                    record = parse_record(name, row_index, line.removeprefix(BYTE_ORDER_MARK))
                except RowError:
                    continue  # the row itself reports it, when it is read
                keys.update(dict.fromkeys(record))
        row_index += len(lines)
        if row_index >= num_records or (keys and stream.position >= BLOCK_BYTES):
            break
    return keys


FORMAT = JsonlFormat()
