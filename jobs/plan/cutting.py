"""Cuts sources into shards: contiguous ranges of about 30 seconds of work.

Counts newlines and reads footers; parses no row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gristmill.jobs.errors import SourceError
from gristmill.jobs.input.files import map_inputs, refuse_unreadable
from gristmill.jobs.input.formats.base import RecordEnds
from gristmill.jobs.input.formats.registry import format_of
from gristmill.jobs.source import Plan, ShardRange, Source

TARGET_SHARD_S = 30.0
MIN_SHARD_ROWS = 64
MAX_SHARD_ROWS = 65536
MAX_UNLEARNED_SHARD_ROWS = 1024
MAX_KEPT_BYTES = 32 << 20  # of a shard whose columns are kept: its rows are in memory until it is committed


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
    num_rows = _load_row_counts(sources) if limit is None else {}
    for source_index, source in enumerate(sources):
        if cutter.is_full:
            break
        cutter.begin_source(source_index)
        if format_of(source).is_scanned:
            _cut_records(cutter, source)
        else:
            known = num_rows.get(source_index)
            cutter.add_rows(_count_rows(source) if known is None else known)
        cutter.end_source()
    shards = cutter.shards or [ShardRange(0, 0, 0, 0, 0, 0, 0)]
    return Plan(tuple(shards), sum(shard.num_rows for shard in shards))


def learned_shard_rows(rows_per_s: float) -> int:
    """The rows of a shard of TARGET_SHARD_S at this rate."""
    return int(min(max(TARGET_SHARD_S * rows_per_s, MIN_SHARD_ROWS), MAX_SHARD_ROWS))


def plan_range(
    source: Source, source_index: int, shard_rows: int, begin: int = 0, end: int | None = None
) -> list[ShardRange]:
    """Shards of a whole source, or of the JSONL records that begin in its bytes [begin, end).

    first_row counts from the first of these records. Blank records at the end belong to the last shard, or make
    one without rows, so that the records of all shards are all records of the range.
    """
    cutter = _Cutter(_iterate_sizes(shard_rows, None), None)
    form = format_of(source)
    if not form.is_scanned:
        cutter.begin_source(source_index)
        cutter.add_rows(form.count_rows(source))
    else:
        try:
            first = begin if end is None else form.find_record(source, begin, end)
        except SourceError as error:
            raise refuse_unreadable(error) from None
        if first is None:
            return []
        cutter.begin_source(source_index, first)
        _cut_records(cutter, source, first, end)
    cutter.end_range()
    return cutter.shards


def plan_job_shards(
    sources: Sequence[Source],
    shard_rows: int | None,
    rows_per_s: float | None,
    limit: int | None,
    *,
    keeps_columns: bool,
    max_kept_bytes: int = MAX_KEPT_BYTES,
) -> Plan:
    """As plan_shards, with smaller shards where large rows are kept and no size is asked for."""
    plan = plan_shards(sources, shard_rows, rows_per_s, limit)
    if not keeps_columns or shard_rows is not None:
        return plan
    fewer = smaller_shard_rows(plan.shards, map_inputs(load_row_bytes, sources), max_kept_bytes)
    return plan if fewer is None else plan_shards(sources, fewer, None, limit)


def smaller_shard_rows(
    shards: Sequence[ShardRange], footer_row_bytes: Iterable[float], max_kept_bytes: int
) -> int | None:
    """The rows a shard may have so that its rows fit into `max_kept_bytes`; None: these shards do."""
    scanned_row_bytes = (shard.byte_size / max(1, shard.num_rows) for shard in shards)  # others: 0 bytes
    row_bytes = max([0.0, *scanned_row_bytes, *footer_row_bytes])
    if row_bytes * max((shard.num_rows for shard in shards), default=0) <= max_kept_bytes:
        return None
    return max(1, int(max_kept_bytes / row_bytes))


def _load_row_counts(sources: Sequence[Source]) -> dict[int, int]:
    """The rows of the sources with a footer, by source_index; many are asked at once."""
    counted = [index for index, source in enumerate(sources) if not format_of(source).is_scanned]
    counts = map_inputs(_count_rows, [sources[index] for index in counted])
    return dict(zip(counted, counts, strict=True))


def _count_rows(source: Source) -> int:
    return format_of(source).count_rows(source)


def load_row_bytes(source: Source) -> float:
    """The mean size of a row by the footer; 0 where the shards know their bytes."""
    form = format_of(source)
    return 0.0 if form.is_scanned else form.load_row_bytes(source)


def _cut_records(cutter: _Cutter, source: Source, begin: int = 0, end: int | None = None) -> None:
    try:
        for records in format_of(source).scan_records(source, begin, end):
            cutter.add_records(records)
            if cutter.is_full:
                break
    except SourceError as error:
        raise refuse_unreadable(error) from None


def _iterate_sizes(shard_rows: int | None, rows_per_s: float | None) -> Iterator[int]:
    """The wanted size of each shard. Unlearned jobs begin small, so that the first figures come early."""
    if shard_rows is None and rows_per_s is not None:
        shard_rows = learned_shard_rows(rows_per_s)
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

    def begin_source(self, source_index: int, byte_offset: int = 0) -> None:
        self._open = ShardRange(len(self.shards), source_index, 0, 0, 0, byte_offset, 0)

    def end_source(self) -> None:
        if self._open.num_rows:
            self._close()

    def end_range(self) -> None:
        """As end_source, with the blank records at the end kept."""
        rest = self._open
        if self.shards and not rest.num_rows:
            last = self.shards.pop()
            self._open = replace(
                last,
                num_records=last.num_records + rest.num_records,
                byte_size=last.byte_size + rest.byte_size,
            )
        if self._open.num_records:
            self._close()

    def add_rows(self, num_rows: int) -> None:
        """Rows that need no bytes to be found."""
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
