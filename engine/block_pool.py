"""The KV cache's blocks as numbers: reference counts and a free list, both O(1).

It knows nothing of what the blocks hold.
"""

from __future__ import annotations


class BlockPool:
    """num_blocks blocks, each free or referenced by one or more holders (sequences, the prefix tree)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def ref_count(self, block: int) -> int:
        """How many hold this block."""
        return self._ref_counts[block]

    def allocate(self) -> int:
        """A free block, held once. The caller has checked num_free."""
        block = self._free.pop()
        assert self._ref_counts[block] == 0, f"block {block} was free and referenced"
        self._ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is in use."""
        assert self._ref_counts[block] > 0, f"block {block} is free and can't be shared"
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one frees the block."""
        assert self._ref_counts[block] > 0, f"block {block} was released twice"
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + used == total, and free means unreferenced."""
        assert len(set(self._free)) == len(self._free), "a block is twice in the free list"
        assert all(self._ref_counts[b] == 0 for b in self._free), "a free block is referenced"
        used = sum(count > 0 for count in self._ref_counts)
        assert used + len(self._free) == self.num_blocks, (
            f"{used} used + {len(self._free)} free != {self.num_blocks}"
        )
