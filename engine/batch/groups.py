"""Which rows of a step share which KV blocks: the groups whose keys attention reads once for all their rows.

Found in the block tables themselves: where neighbours' tables begin with the same ids, they share those blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels.contract import PrefixGroup

IsWorthwhile = Callable[[int, int], bool]  # whether a group of so many rows and so many blocks is


def plan_groups(
    tables: NDArray[np.int32], num_full: NDArray[np.int64], is_worthwhile: IsWorthwhile
) -> tuple[PrefixGroup, ...]:
    """The groups of rows that are sorted by prompt, each inside another or beside it.

    tables: [n, max_blocks]; num_full: [n], each row's blocks that were complete before the step: only they are shared.
    """
    if len(tables) < 2:
        return ()
    shared = _common_blocks(tables, num_full)
    groups: list[PrefixGroup] = []
    open_runs: list[
        tuple[int, int]
    ] = []  # (first row, blocks that all rows since then share), blocks growing
    for row, common in enumerate([*shared.tolist(), 0], start=1):
        first = row - 1
        while open_runs and open_runs[-1][1] > common:
            first, num_blocks = open_runs.pop()
            outer = max(common, open_runs[-1][1] if open_runs else 0)
            groups.append(PrefixGroup(first, row - first, outer, num_blocks - outer))
        if common > (open_runs[-1][1] if open_runs else 0):
            open_runs.append((first, common))
    groups.sort(key=lambda g: (g.first_sequence, g.first_block))
    return _select(groups, is_worthwhile)


def _common_blocks(tables: NDArray[np.int32], num_full: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n - 1]: how many leading blocks each row shares with the next one."""
    width = int(num_full.max())
    if width == 0:
        return np.zeros(len(tables) - 1, np.int64)
    differ = tables[:-1, :width] != tables[1:, :width]
    common = np.where(differ.any(1), differ.argmax(1), width)
    limit: NDArray[np.int64] = np.minimum(num_full[:-1], num_full[1:])
    return np.minimum(common, limit)


def _select(groups: list[PrefixGroup], is_worthwhile: IsWorthwhile) -> tuple[PrefixGroup, ...]:
    """Leaves out groups that save too little; their blocks go to the groups inside them, or to the rows' own parts.

    groups: outer ones before those inside them.
    """
    kept: list[PrefixGroup] = []
    path: list[PrefixGroup] = []  # the kept groups that the present one lies in
    for group in groups:
        while path and path[-1].first_sequence + path[-1].num_sequences <= group.first_sequence:
            path.pop()
        start = path[-1].first_block + path[-1].num_blocks if path else 0
        size = group.first_block + group.num_blocks - start
        if is_worthwhile(group.num_sequences, size):
            kept.append(PrefixGroup(group.first_sequence, group.num_sequences, start, size))
            path.append(kept[-1])
    return tuple(kept)
