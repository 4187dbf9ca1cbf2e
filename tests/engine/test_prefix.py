"""The prefix tree: what is shared, who waits, what is kept and for how long."""

from __future__ import annotations

import numpy as np
import pytest

from gristmill.engine.batch.block_pool import BlockPool
from gristmill.engine.batch.prefix import PrefixTree
from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.batch.sequence import Slots
from tests.engine.simulation import build_sequence, run_step, run_to_end


class Rows:
    """Sequences in slots, their blocks taken as the scheduler takes them."""

    def __init__(self, num_blocks=32):
        self.tree = PrefixTree(BlockPool(num_blocks))
        self.slots = Slots(8, max_tokens=512)

    def add(self, *prompts):
        rows = [build_sequence(p) for p in prompts]
        for row in rows:
            self.tree.add(row)
        return rows

    def start(self, row):
        """Admits a row with blocks for its whole prompt, sharing what is there; a block shared in part is its own."""
        match, pool = self.tree.match(row), self.tree.pool
        shared = match.blocks[: match.num_tokens // 16]
        pool.share(shared)
        own = pool.allocate(-(-row.num_prompt_tokens // 16) - len(shared))
        table = np.array([*shared, *own], np.int32)
        self.slots.occupy(row, table, len(shared), match.num_tokens)
        self.tree.admit(row)
        return match

    def compute(self, row, num_tokens):
        self.slots.num_computed[row.slot] = num_tokens
        self.tree.publish(row)
        self.tree.check_integrity()

    def stop(self, row):
        self.tree.suspend(row)
        self.tree.pool.release(row.block_table)
        self.slots.vacate(row)
        self.tree.remove(row)
        self.tree.check_integrity()


def test_the_last_prompt_token_is_never_taken_from_the_cache():
    rows = Rows()
    first, second = rows.add(range(32), range(32))
    rows.start(first)
    rows.compute(first, 32)
    assert rows.tree.match(second).num_tokens == 31


@pytest.mark.parametrize("comes_late", [False, True])
def test_tokens_are_shared_up_to_where_prompts_part_within_a_block(comes_late):
    """A later prompt splits the path, whose halves keep their blocks."""
    rows = Rows()
    prompts = [range(100), [*range(53), *[9] * 30]]
    long, *early = rows.add(*prompts[: 1 if comes_late else 2])
    rows.start(long)
    rows.compute(long, 100)
    (fork,) = early or rows.add(prompts[1])
    rows.tree.check_integrity()
    match = rows.tree.match(fork)
    assert match.num_tokens == 53 and match.blocks == long.block_table[:4].tolist() and not match.must_wait
    match = rows.tree.match(long)
    assert match.num_tokens == 99 and match.blocks == long.block_table[:7].tolist()


def test_a_fork_within_a_block_has_its_own_version_of_it():
    rows = Rows()
    first, second, third = rows.add(
        [*range(20), *[1] * 30], [*range(20), *[2] * 30], [*range(20), *[2] * 9, 3]
    )
    rows.start(first)
    rows.compute(first, 50)
    rows.start(second)
    rows.compute(second, 50)
    match = rows.tree.match(third)
    assert match.num_tokens == 29
    assert match.blocks == [int(first.block_table[0]), int(second.block_table[1])]


def test_a_sharer_waits_only_while_someone_computes_the_next_token():
    rows = Rows()
    first, second, _ = rows.add(*([*range(64), i] for i in range(3)))
    rows.start(first)
    rows.compute(first, 40)
    assert rows.tree.match(second).must_wait
    rows.tree.suspend(first)
    match = rows.tree.match(second)
    assert not match.must_wait and match.num_tokens == 40


def test_a_prefix_is_kept_for_rows_to_come_and_freed_after_the_last():
    rows = Rows()
    first, second = rows.add(*([*range(64), i] for i in range(2)))
    rows.start(first)
    rows.compute(first, 65)
    rows.stop(first)
    assert rows.tree.pool.num_used == 4
    assert rows.start(second).num_tokens == 64
    rows.stop(second)
    assert rows.tree.pool.num_used == 0


def test_eviction_takes_the_prefix_with_fewest_users_to_come_first():
    rows = Rows()
    popular = rows.add(*([*[1] * 64, i] for i in range(4)))
    rare = rows.add(*([*[2] * 64, i] for i in range(2)))
    for row in (popular[0], rare[0]):
        rows.start(row)
        rows.compute(row, 65)
        rows.stop(row)
    assert rows.tree.evict(2) == 2
    assert [rows.tree.match(r).num_tokens for r in (popular[1], rare[1])] == [64, 32]
    assert rows.tree.evict(3, max_waiting=1) == 2
    assert rows.tree.evict(100) == 4
    assert rows.tree.pool.num_used == 0


def test_eviction_spares_blocks_that_a_running_sequence_holds():
    rows = Rows()
    first, _ = rows.add(*([*range(64), i] for i in range(2)))
    rows.start(first)
    rows.compute(first, 65)
    assert rows.tree.evict(10) == 0


def test_a_block_with_tokens_of_several_nodes_is_freed_when_the_last_of_them_is_evicted():
    rows = Rows()
    first, *_ = rows.add([*range(20), *[1] * 20], [*range(20), *[1] * 4, 2], [*range(20), 3], [*range(20), 4])
    rows.start(first)
    rows.compute(first, 40)
    rows.stop(first)
    used = rows.tree.pool.num_used
    assert rows.tree.evict(100) == used > 0
    assert rows.tree.pool.num_used == 0


def test_three_levels_are_computed_once_each():
    scheduler = Scheduler(num_blocks=256, max_num_seqs=64, max_num_batched_tokens=512)
    system, documents = [1] * 64, [[10 + d] * 48 for d in range(3)]
    rows = [build_sequence([*system, *d, q, q], max_tokens=2) for d in documents for q in range(4)]
    scheduler.add(rows)
    run_to_end(scheduler)
    total = sum(r.num_prompt_tokens for r in rows)
    unique = 64 + 3 * 48 + 12 * 2
    assert total - scheduler.counters().num_cached_tokens == unique


def test_rows_that_arrive_later_join_a_prefix_in_use():
    scheduler = Scheduler(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    scheduler.add([build_sequence([*range(64), 1], max_tokens=8)])
    run_step(scheduler)
    late = build_sequence([*range(64), 2], max_tokens=2)
    scheduler.add([late])
    run_to_end(scheduler)
    assert late.num_cached_tokens == 64
