"""The KV cache's blocks as numbers: reference counts and a free list, a whole list of blocks at a time.

It knows nothing of what the blocks hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Blocks = Sequence[int] | NDArray[np.int32]  # no block twice


class BlockPool:
    """num_blocks blocks, each free or referenced by one or more holders (sequences, the prefix tree)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: its first num_free entries
        self.num_free = num_blocks  # blocks that nobody holds

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return int(self._ref_counts[block])

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Free blocks, each held once. The caller has checked num_free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks = self._free[self.num_free - count : self.num_free][::-1].copy()
        assert not self._ref_counts[blocks].any(), f"a block of {blocks} was free and referenced"
        self._ref_counts[blocks] = 1
        self.num_free -= count
        return blocks

    def share(self, blocks: Blocks) -> None:
        """One more holder of blocks that are in use."""
        index = np.asarray(blocks, np.int32)
        assert (self._ref_counts[index] > 0).all(), f"a block of {blocks} is free and can't be shared"
        self._ref_counts[index] += 1

    def release(self, blocks: Blocks) -> None:
        """One holder less of each; the last one frees a block."""
        index = np.asarray(blocks, np.int32)
        counts = self._ref_counts[index] - 1
        assert (counts >= 0).all(), f"a block of {blocks} was released twice"
        self._ref_counts[index] = counts
        freed = index[counts == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed[::-1]
        self.num_free += len(freed)

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + used == total, and free means unreferenced."""
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == len(free), "a block is twice in the free list"
        assert not self._ref_counts[free].any(), "a free block is referenced"
        used = int((self._ref_counts > 0).sum())
        assert used + len(free) == self.num_blocks, f"{used} used + {len(free)} free != {self.num_blocks}"
