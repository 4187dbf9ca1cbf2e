"""Where the records of a JSONL source end, and which of them are rows: a numpy scan that parses nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gristmill.jobs.input.bytestream import BYTE_ORDER_MARK, ByteStream
from gristmill.jobs.input.formats.base import RecordEnds
from gristmill.jobs.source import Source

_SCAN_BYTES = 4 << 20
_SEARCH_BYTES = 64 << 10
_NEWLINE = 10
_IS_TEXT = np.ones(256, dtype=np.bool_)
_IS_TEXT[[9, 10, 11, 12, 13, 32]] = False  # what bytes.isspace() says, so that the reader agrees


def scan_records(source: Source, begin: int = 0, end: int | None = None) -> Iterator[RecordEnds]:
    """As InputFormat.scan_records."""
    stream = ByteStream(source)
    try:
        stream.move_to(begin, end)
        yield from _scan_stream(stream, end)
    finally:
        stream.close()


def find_record(source: Source, begin: int, end: int) -> int | None:
    """As InputFormat.find_record."""
    if begin == 0:
        return 0 if source.size_bytes else None
    stream = ByteStream(source)
    try:
        stream.move_to(begin - 1, end)
        while stream.position < end and (chunk := stream.read(min(_SEARCH_BYTES, end - stream.position))):
            newline = chunk.find(b"\n")
            if newline >= 0:
                found = stream.position - len(chunk) + newline + 1
                return found if found < min(end, source.size_bytes) else None
        return None
    finally:
        stream.close()


def _scan_stream(stream: ByteStream, end: int | None) -> Iterator[RecordEnds]:
    record_start = stream.position
    open_bytes, open_is_row = 0, False  # the record that the last chunk left unfinished
    while end is None or record_start < end:
        chunk = stream.read(_chunk_size(stream.position, end))
        if not chunk:
            break
        start = stream.position - len(chunk)
        if start == 0 and chunk.startswith(BYTE_ORDER_MARK):
            chunk = b"   " + chunk[3:]
        data = np.frombuffer(chunk, dtype=np.uint8)
        newlines = np.flatnonzero(data == _NEWLINE)
        if newlines.size == 0:
            open_bytes += len(chunk)
            open_is_row = open_is_row or bool(chunk.strip())
            continue
        is_row = _find_rows(data, newlines)
        is_row[0] |= open_is_row
        ends = newlines + (start + 1)
        if end is not None and stream.position > end:
            num_ours = 1 + int(np.searchsorted(ends[:-1], end))  # a record begins where the one before ends
            ends, is_row = ends[:num_ours], is_row[:num_ours]
        yield RecordEnds(ends, is_row)
        record_start = int(ends[-1])
        rest = chunk[int(newlines[-1]) + 1 :]
        open_bytes, open_is_row = len(rest), bool(rest.strip())
    if open_bytes and (end is None or record_start < end):
        yield RecordEnds(np.array([stream.position], dtype=np.int64), np.array([open_is_row]))


def _chunk_size(position: int, end: int | None) -> int:
    """Up to `end`, then by little: only the rest of one record is wanted. Never half a byte order mark."""
    if end is None:
        return max(_SCAN_BYTES, len(BYTE_ORDER_MARK)) if position == 0 else _SCAN_BYTES
    if position >= end:
        return _SEARCH_BYTES
    return max(min(_SCAN_BYTES, end - position), len(BYTE_ORDER_MARK))


def _find_rows(data: NDArray[np.uint8], newlines: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For the records that end in this chunk: is there anything but whitespace."""
    starts = np.empty_like(newlines)
    starts[0] = 0
    starts[1:] = newlines[:-1] + 1
    is_row = _IS_TEXT[data[starts]]
    undecided = ~is_row & (newlines > starts)  # begins with whitespace: look at all of it
    if undecided.any():
        is_row = np.logical_or.reduceat(_IS_TEXT[data[: int(newlines[-1]) + 1]], starts)
    return is_row
