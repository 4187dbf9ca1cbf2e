"""Where the shards of a spool end: near the wanted size, where the last row shares least with the next one.

A prefix that lies in two shards may be computed twice, by two workers.
"""

from __future__ import annotations

from gristmill.jobs.source import ShardRange

_SLACK = 8  # a shard may be longer or shorter by this fraction of it


class ShardBoundaries:
    """Finds the borders while the rows go by, file by file."""

    def __init__(self, shard_rows: int, is_exact: bool) -> None:
        slack_rows = 0 if is_exact else shard_rows // _SLACK
        self.shards: list[ShardRange] = []
        self._min_rows = max(1, shard_rows - slack_rows)
        self._max_rows = shard_rows + slack_rows
        self._source_index = 0
        self._num_rows = 0  # all rows so far
        self._ends: list[int] = []  # of the open rows, in the file; [0] is where the first one begins
        self._shared: list[int] = []  # what each open row shares with the one before

    def begin_file(self, source_index: int) -> None:
        """The rows that follow are in this file, from its start."""
        self._source_index = source_index
        self._ends = [0]

    def add(self, num_bytes: int, num_shared: int) -> None:
        """The next row."""
        self._ends.append(self._ends[-1] + num_bytes)
        self._shared.append(num_shared)
        if len(self._shared) > self._max_rows:
            self._cut(self._find_border())

    def end_file(self) -> None:
        """What is open becomes a shard."""
        if self._shared:
            self._cut(len(self._shared))

    def _find_border(self) -> int:
        """How many open rows the shard gets: the border before the row that shares least."""
        candidates = range(self._min_rows, self._max_rows + 1)
        return min(candidates, key=lambda index: (self._shared[index], -index))

    def _cut(self, num_rows: int) -> None:
        begin, end = self._ends[0], self._ends[num_rows]
        self.shards.append(
            ShardRange(
                len(self.shards), self._source_index, self._num_rows, num_rows, num_rows, begin, end - begin
            )
        )
        self._num_rows += num_rows
        self._ends = self._ends[num_rows:]
        self._shared = self._shared[num_rows:]
