"""Cuts sources into shards: contiguous ranges of about 30 seconds of work.

Counts newlines and reads Parquet footers; parses no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.errors import RefusedError, SourceError
from jobs.jsonl_scan import RecordEnds, scan_records
from jobs.sources import Source

TARGET_SHARD_S = 30.0
MIN_SHARD_ROWS = 64
MAX_SHARD_ROWS = 65536
MAX_UNLEARNED_SHARD_ROWS = 1024


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A contiguous range of one source. Bytes are of the decompressed stream; 0 for Parquet."""

    shard_index: int
    source_index: int
    first_row: int  # row_index of the first record
    num_rows: int  # rows, blank JSONL records not counted
    num_records: int  # JSONL records, blank ones counted; Parquet: num_rows
    byte_offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a job, in input order; together they hold `num_rows` rows."""

    shards: tuple[ShardRange, ...]
    num_rows: int


def plan_shards(
    sources: Sequence[Source],
    shard_rows: int | None = None,
    rows_per_s: float | None = None,
    limit: int | None = None,
) -> Plan:
    """Shards of `shard_rows` rows, or of TARGET_SHARD_S at `rows_per_s`, or growing from MIN_SHARD_ROWS.

    A shard is within one source. `limit` counts rows over the sources in order; what lies after it is not
    read. A job without rows has one shard of 0 rows. RefusedError for a source that is damaged.
    """
    cutter = _Cutter(_iterate_sizes(shard_rows, rows_per_s), limit)
    for source_index, source in enumerate(sources):
        if cutter.is_full:
            break
        cutter.begin_source(source_index)
        if source.format == "parquet":
            cutter.add_rows(load_num_rows(source))
        else:
            _cut_records(cutter, source)
        cutter.end_source()
    shards = cutter.shards or [ShardRange(0, 0, 0, 0, 0, 0, 0)]
    return Plan(tuple(shards), sum(shard.num_rows for shard in shards))


def load_num_rows(source: Source) -> int:
    """The rows of a Parquet file, by its footer. RefusedError when it is not a whole Parquet file."""
    try:
        return int(pq.read_metadata(source.uri).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise RefusedError(
            f"can't read {source.uri!r} as Parquet: {error}; replace the damaged file"
        ) from None


def _cut_records(cutter: _Cutter, source: Source) -> None:
    try:
        for records in scan_records(source):
            cutter.add_records(records)
            if cutter.is_full:
                break
    except SourceError as error:
        raise RefusedError(str(error)) from None


def _iterate_sizes(shard_rows: int | None, rows_per_s: float | None) -> Iterator[int]:
    """The wanted size of each shard. Unlearned jobs begin small, so that the first figures come early."""
    if shard_rows is None and rows_per_s is not None:
        shard_rows = int(min(max(TARGET_SHARD_S * rows_per_s, MIN_SHARD_ROWS), MAX_SHARD_ROWS))
    size = shard_rows or MIN_SHARD_ROWS
    while True:
        yield size
        if shard_rows is None:
            size = min(size * 2, MAX_UNLEARNED_SHARD_ROWS)


class _Cutter:
    """Collects records into an open shard and closes it when it has its rows."""

    def __init__(self, sizes: Iterator[int], limit: int | None) -> None:
        self.shards: list[ShardRange] = []
        self._sizes = sizes
        self._room = limit  # rows until the limit; None: no limit
        self._target = next(sizes)
        self._open = ShardRange(0, 0, 0, 0, 0, 0, 0)

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._room == 0

    def begin_source(self, source_index: int) -> None:
        self._open = ShardRange(len(self.shards), source_index, 0, 0, 0, 0, 0)

    def end_source(self) -> None:
        if self._open.num_rows:
            self._close()

    def add_rows(self, num_rows: int) -> None:
        """Rows that need no bytes to be found (Parquet)."""
        while num_rows and not self.is_full:
            taken = min(num_rows, self._num_wanted())
            self._grow(taken, taken, 0)
            num_rows -= taken

    def add_records(self, records: RecordEnds) -> None:
        """The next records of the present source, up to the limit."""
        row_counts = np.cumsum(records.is_row)
        begin, rows_before = 0, 0
        while begin < len(row_counts) and not self.is_full:
            wanted = self._num_wanted()
            last = min(int(np.searchsorted(row_counts, rows_before + wanted)), len(row_counts) - 1)
            rows_now = int(row_counts[last])
            size = int(records.ends[last]) - self._open.byte_offset - self._open.byte_size
            self._grow(rows_now - rows_before, last + 1 - begin, size)
            begin, rows_before = last + 1, rows_now

    def _num_wanted(self) -> int:
        wanted = self._target - self._open.num_rows
        return wanted if self._room is None else min(wanted, self._room)

    def _grow(self, num_rows: int, num_records: int, byte_size: int) -> None:
        shard = self._open
        self._open = replace(
            shard,
            num_rows=shard.num_rows + num_rows,
            num_records=shard.num_records + num_records,
            byte_size=shard.byte_size + byte_size,
        )
        if self._room is not None:
            self._room -= num_rows
        if self._open.num_rows == self._target or self.is_full:
            self._close()

    def _close(self) -> None:
        shard = self._open
        self.shards.append(shard)
        self._target = next(self._sizes)
        self._open = ShardRange(
            shard_index=len(self.shards),
            source_index=shard.source_index,
            first_row=shard.first_row + shard.num_records,
            num_rows=0,
            num_records=0,
            byte_offset=shard.byte_offset + shard.byte_size,
            byte_size=0,
        )
