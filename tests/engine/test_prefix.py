"""The prefix tree: what is shared, who waits, what is kept and for how long."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.prefix import PrefixTree
from engine.scheduler import Scheduler
from tests.engine.simulation import build_sequence, run_step, run_to_end


def start(tree, sequence):
    """Admits a sequence with blocks for its whole prompt, sharing what is there."""
    match = tree.match(sequence)
    for block in match.blocks:
        tree.pool.share(block)
    own = -(-sequence.num_prompt_tokens // 16) - len(match.blocks)
    sequence.block_table = match.blocks + [tree.pool.allocate() for _ in range(own)]
    sequence.num_tree_blocks = len(match.blocks)
    tree.admit(sequence)
    return match


def compute(tree, sequence, num_tokens):
    sequence.num_computed_tokens = num_tokens
    tree.publish(sequence)


def stop(tree, sequence):
    tree.suspend(sequence)
    for block in sequence.block_table:
        tree.pool.release(block)
    tree.remove(sequence)


def test_the_last_prompt_token_is_never_taken_from_the_cache():
    tree = PrefixTree(BlockPool(8))
    rows = [build_sequence(range(32)) for _ in range(2)]
    for row in rows:
        tree.add(row)
    start(tree, rows[0])
    compute(tree, rows[0], 32)
    assert len(tree.match(rows[1]).blocks) == 1


def test_paths_split_where_prompts_part_and_keep_their_blocks():
    tree = PrefixTree(BlockPool(32))
    long = build_sequence(range(100))
    tree.add(long)
    start(tree, long)
    compute(tree, long, 100)
    fork = build_sequence([*range(48), *[9] * 30])
    tree.add(fork)
    tree.check_integrity()
    match = tree.match(fork)
    assert match.blocks == long.block_table[:3] and not match.must_wait
    assert tree.match(long).blocks == long.block_table[:6]


def test_a_sharer_waits_only_while_someone_computes_the_next_block():
    tree = PrefixTree(BlockPool(32))
    rows = [build_sequence([*range(64), i]) for i in range(3)]
    for row in rows:
        tree.add(row)
    start(tree, rows[0])
    compute(tree, rows[0], 32)
    assert tree.match(rows[1]).must_wait
    tree.suspend(rows[0])
    match = tree.match(rows[1])
    assert not match.must_wait and len(match.blocks) == 2


def test_a_prefix_is_kept_for_rows_to_come_and_freed_after_the_last():
    tree = PrefixTree(BlockPool(32))
    rows = [build_sequence([*range(64), i]) for i in range(2)]
    for row in rows:
        tree.add(row)
    start(tree, rows[0])
    compute(tree, rows[0], 65)
    stop(tree, rows[0])
    assert tree.pool.num_used == 4
    assert len(start(tree, rows[1]).blocks) == 4
    stop(tree, rows[1])
    assert tree.pool.num_used == 0


def test_eviction_takes_the_prefix_with_fewest_users_first():
    tree = PrefixTree(BlockPool(32))
    popular = [build_sequence([*[1] * 64, i]) for i in range(4)]
    rare = [build_sequence([*[2] * 64, i]) for i in range(2)]
    for row in popular + rare:
        tree.add(row)
    for row in (popular[0], rare[0]):
        start(tree, row)
        compute(tree, row, 65)
        stop(tree, row)
    assert tree.evict(2) == 2
    assert [len(tree.match(r).blocks) for r in (popular[1], rare[1])] == [4, 2]
    assert tree.evict(100) == 6
    assert tree.pool.num_used == 0


def test_eviction_spares_blocks_that_a_running_sequence_holds():
    tree = PrefixTree(BlockPool(32))
    rows = [build_sequence([*range(64), i]) for i in range(2)]
    for row in rows:
        tree.add(row)
    start(tree, rows[0])
    compute(tree, rows[0], 65)
    assert tree.evict(10) == 0


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
