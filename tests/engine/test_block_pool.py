"""The block pool: references are counted, free blocks come back, and misuse is caught."""

from __future__ import annotations

import pytest

from gristmill.engine.batch.block_pool import BlockPool


def test_a_released_block_is_allocated_again():
    pool = BlockPool(2)
    first, second = pool.allocate(2).tolist()
    assert pool.num_free == 0 and first != second
    pool.release([first])
    assert pool.allocate(1).tolist() == [first]
    pool.check_integrity()


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(1)
    (block,) = pool.allocate(1).tolist()
    pool.share([block])
    pool.release([block])
    assert (pool.num_free, pool.ref_count(block)) == (0, 1)
    pool.release([block])
    assert pool.num_free == 1
    pool.check_integrity()


def test_releasing_twice_is_our_bug():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="can't be shared"):
        BlockPool(1).share([0])


def test_integrity_notices_a_free_block_that_is_referenced():
    pool = BlockPool(2)
    pool.allocate(1)
    pool.num_free += 1
    with pytest.raises(AssertionError, match="referenced"):
        pool.check_integrity()


def test_more_blocks_than_are_free_cannot_be_allocated():
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3)
