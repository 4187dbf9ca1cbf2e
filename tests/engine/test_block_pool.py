"""The block pool: references are counted, free blocks come back, and misuse is caught."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool


def test_a_released_block_is_allocated_again():
    pool = BlockPool(2)
    first = pool.allocate()
    pool.allocate()
    assert pool.num_free == 0
    pool.release(first)
    assert pool.allocate() == first


def test_a_shared_block_stays_until_its_last_holder_leaves():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_free, pool.ref_count(block)) == (0, 1)
    pool.release(block)
    assert pool.num_free == 1
    pool.check_integrity()


def test_releasing_twice_is_our_bug():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(block)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(AssertionError, match="can't be shared"):
        BlockPool(1).share(0)


def test_integrity_notices_a_free_block_that_is_referenced():
    pool = BlockPool(2)
    block = pool.allocate()
    pool._free.append(block)
    with pytest.raises(AssertionError, match="referenced"):
        pool.check_integrity()
