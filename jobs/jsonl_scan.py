"""Where the records of a JSONL source end, and which of them are rows: a numpy scan that parses nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.bytestream import BYTE_ORDER_MARK, ByteStream
from jobs.sources import Source

_SCAN_BYTES = 4 << 20
_NEWLINE = 10
_IS_TEXT = np.ones(256, dtype=np.bool_)
_IS_TEXT[[9, 10, 11, 12, 13, 32]] = False  # what bytes.isspace() says, so that the reader agrees


class RecordEnds(NamedTuple):
    """Where each record ends (after its newline) in the decompressed stream, and whether it is a row."""

    ends: NDArray[np.int64]
    is_row: NDArray[np.bool_]


def scan_records(source: Source) -> Iterator[RecordEnds]:
    """The record ends of a whole source, by chunks. SourceError when it can't be read or decompressed."""
    stream = ByteStream(source)
    open_bytes, open_is_row = 0, False  # the record that the last chunk left unfinished
    try:
        while chunk := stream.read(_SCAN_BYTES):
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
            yield RecordEnds(newlines + (start + 1), is_row)
            rest = chunk[int(newlines[-1]) + 1 :]
            open_bytes, open_is_row = len(rest), bool(rest.strip())
        if open_bytes:
            yield RecordEnds(np.array([stream.position], dtype=np.int64), np.array([open_is_row]))
    finally:
        stream.close()


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
