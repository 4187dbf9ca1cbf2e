"""The groups of rows that share blocks, against the block tables they were found in."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.engine.batch.groups import plan_groups
from gristmill.kernels.contract import PrefixGroup
from gristmill.kernels.torch.backend import TorchBackend

WIDTH = 6
row = st.tuples(st.lists(st.integers(0, 1), min_size=WIDTH, max_size=WIDTH), st.integers(0, WIDTH))


def tables_of(rows):
    """Block tables of rows in order: rows with the same path share its blocks."""
    ids: dict[tuple[int, ...], int] = {}
    return np.array(
        [[ids.setdefault(tuple(r[: k + 1]), len(ids)) for k in range(WIDTH)] for r in rows], np.int32
    )


@given(st.lists(row, min_size=1, max_size=9))
def test_groups_nest_tile_each_row_from_its_start_and_find_all_that_is_shared(rows):
    rows.sort()
    tables, full = tables_of([r for r, _ in rows]), np.array([n for _, n in rows])
    found = plan_groups(tables, full, lambda num_sequences, num_blocks: num_sequences > 1 and num_blocks > 0)
    covered = [blocks_of(found, i) for i in range(len(rows))]
    for i, path in enumerate(covered):
        end = 0
        for group in path:
            assert group.first_block == end
            end += group.num_blocks
            shared = tables[i, group.first_block : end]
            assert (shared == tables[group.first_sequence, group.first_block : end]).all()
        assert end <= full[i]
    for i in range(len(rows) - 1):
        both = [g for g in covered[i] if g in covered[i + 1]]
        common = int((tables[i] == tables[i + 1]).cumprod().sum())
        assert sum(g.num_blocks for g in both) == min(common, full[i], full[i + 1])


def blocks_of(found, index):
    return [g for g in found if g.first_sequence <= index < g.first_sequence + g.num_sequences]


def test_a_group_that_saves_little_leaves_its_blocks_to_those_inside_it():
    tables = np.arange(40 * 60, dtype=np.int32).reshape(40, 60)
    tables[:, :1] = 0
    tables[:20, 1:30] = tables[0, 1:30]
    full = np.full(40, 60)
    gate = TorchBackend().is_worthwhile
    assert plan_groups(tables, full, gate) == (PrefixGroup(0, 40, 0, 1), PrefixGroup(0, 20, 1, 29))
    assert plan_groups(tables[12:28], full[12:28], gate) == (PrefixGroup(0, 8, 0, 30),)
    assert plan_groups(tables[19:21], full[:2], gate) == ()
