"""Sorting more rows than fit into memory: sorted runs in one scratch file, merged while they are read back."""

from __future__ import annotations

import heapq
import io
import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

RUN_BYTES = 64 << 20
_ITEM_BYTES = 256  # what Python takes for an item besides its bytes
_BUFFER_BYTES = 64 << 20  # of all runs together while they are merged
_HEADER = struct.Struct("<IIqq")


class SortItem(NamedTuple):
    """A record by its key; rows of equal keys keep the order of the input."""

    key: bytes
    source_index: int
    row_index: int
    record: bytes


class ExternalSorter:
    """Takes items in any order and gives them back sorted, in bounded memory. `scratch` is an empty file of ours."""

    def __init__(self, scratch: BinaryIO, run_bytes: int = RUN_BYTES) -> None:
        self._scratch = scratch
        self._run_bytes = run_bytes
        self._items: list[SortItem] = []
        self._num_bytes = 0
        self._run_ends: list[int] = []

    def add(self, item: SortItem) -> None:
        """One more item."""
        self._items.append(item)
        self._num_bytes += len(item.key) + len(item.record) + _ITEM_BYTES
        if self._num_bytes >= self._run_bytes:
            self._write_run()

    def iterate_sorted(self) -> Iterator[SortItem]:
        """All items in order; call it once, after the last add."""
        if not self._run_ends:
            self._items.sort()
            yield from self._items
            return
        self._write_run()
        buffer_bytes = max(16 << 10, min(1 << 20, _BUFFER_BYTES // len(self._run_ends)))
        begins = [0, *self._run_ends]
        runs = [
            _read_run(self._scratch.fileno(), begin, end, buffer_bytes)
            for begin, end in zip(begins, self._run_ends, strict=False)
        ]
        yield from heapq.merge(*runs)

    def _write_run(self) -> None:
        self._items.sort()
        for key, source_index, row_index, record in self._items:
            self._scratch.write(_HEADER.pack(len(key), len(record), source_index, row_index))
            self._scratch.write(key)
            self._scratch.write(record)
        self._scratch.flush()
        if self._items:
            self._run_ends.append(self._scratch.tell())
        self._items, self._num_bytes = [], 0


class _Range(io.RawIOBase):
    """The bytes [position, end) of an open file, read without moving its own position."""

    def __init__(self, descriptor: int, position: int, end: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._position = position
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        size = min(memoryview(buffer).nbytes, self._end - self._position)
        data = os.pread(self._descriptor, size, self._position)
        memoryview(buffer).cast("B")[: len(data)] = data
        self._position += len(data)
        return len(data)


def _read_run(descriptor: int, begin: int, end: int, buffer_bytes: int) -> Iterator[SortItem]:
    with io.BufferedReader(_Range(descriptor, begin, end), buffer_bytes) as file:
        while header := file.read(_HEADER.size):
            key_size, record_size, source_index, row_index = _HEADER.unpack(header)
            yield SortItem(file.read(key_size), source_index, row_index, file.read(record_size))
