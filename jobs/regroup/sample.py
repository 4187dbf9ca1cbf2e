"""A sample of a planned job's rows: windows of contiguous rows, spread over the input.

A window is what an engine has before it at once: a shard, or several small ones. Of a large input some windows are
read, each from where a shard begins, so that no file is read from its start for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from gristmill.jobs.input.formats.registry import format_of
from gristmill.jobs.input.reading import load_rows
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Plan, ShardRange, Source

MIN_WINDOW_ROWS = 512
MAX_WINDOW_ROWS = 4096  # of a larger shard: its first rows
MAX_SAMPLE_ROWS = 16_384
_MIN_WINDOWS = 4
_MAX_SKIPPED_BYTES = 256 << 20  # of a compressed file: it must be read from its start


def load_windows(sources: Sequence[Source], plan: Plan, columns: Collection[str]) -> Iterator[Iterator[Row]]:
    """The rows of each window, to be read before the next one is asked for. All windows of a small job."""
    windows = _cut_windows(plan)
    sizes = [min(MAX_WINDOW_ROWS, sum(shard.num_rows for shard in window)) for window in windows]
    if sum(sizes) > MAX_SAMPLE_ROWS:
        windows = [
            window for window in windows if _is_near(sources[window[0].source_index], window[0])
        ] or windows[:1]
        num_windows = min(len(windows), max(_MIN_WINDOWS, MAX_SAMPLE_ROWS * len(sizes) // sum(sizes)))
        limits = {format_of(sources[window[0].source_index]).max_windows for window in windows} - {None}
        num_windows = min([num_windows, *(limit for limit in limits if limit)])
        windows = [windows[(2 * i + 1) * len(windows) // (2 * num_windows)] for i in range(num_windows)]
    for window in windows:
        yield islice(_iterate_rows(sources, window, columns), MAX_WINDOW_ROWS)


def _cut_windows(plan: Plan) -> list[list[ShardRange]]:
    """Shards one after the other, joined until they have MIN_WINDOW_ROWS."""
    windows: list[list[ShardRange]] = []
    num_rows = MIN_WINDOW_ROWS
    for shard in plan.shards:
        if num_rows >= MIN_WINDOW_ROWS:
            windows.append([])
            num_rows = 0
        windows[-1].append(shard)
        num_rows += shard.num_rows
    return windows


def _is_near(source: Source, shard: ShardRange) -> bool:
    return source.compression is None or shard.byte_offset <= _MAX_SKIPPED_BYTES


def _iterate_rows(
    sources: Sequence[Source], window: Sequence[ShardRange], columns: Collection[str]
) -> Iterator[Row]:
    for shard in window:
        for rows in load_rows(sources[shard.source_index], shard, columns):
            yield from rows
