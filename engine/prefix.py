"""The prefix tree over all waiting and running requests: it is the prefix cache.

A node is a run of whole blocks of prompt tokens. It knows how many requests will still use it, so nothing is left to
an LRU: a shared block is computed once (the others wait for it), kept while somebody will use it, and freed after the
last. A radix tree at block granularity; its children are found by their first block's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.config import BLOCK_SIZE
from engine.sequence import Sequence

BLOCK_BYTES = BLOCK_SIZE * 4  # a block's token ids as uint32


class PrefixNode:
    """A run of blocks that the same requests share. `blocks` are the leading ones that are computed."""

    __slots__ = ("blocks", "children", "num_running", "num_users", "owner", "parent", "start", "tokens")

    def __init__(self, parent: PrefixNode | None, start: int, tokens: bytes) -> None:
        self.parent = parent
        self.start = start  # blocks before this node
        self.tokens = tokens
        self.children: dict[bytes, PrefixNode] = {}
        self.blocks: list[int] = []
        self.num_users = 0  # waiting and running requests whose prompt begins with this path
        self.num_running = 0
        self.owner: Sequence | None = None  # the running sequence that is computing the missing blocks

    @property
    def end(self) -> int:
        """Blocks up to and including this node."""
        return self.start + len(self.tokens) // BLOCK_BYTES

    @property
    def is_computed(self) -> bool:
        """Whether every block of the node is in the cache."""
        return self.start + len(self.blocks) == self.end


class PrefixMatch(NamedTuple):
    """The computed blocks a prompt begins with; `must_wait` when another sequence is computing the next one."""

    blocks: list[int]
    must_wait: bool


class PrefixTree:
    """Holds one reference on every block it lists. `enabled=False` matches and keeps nothing."""

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = PrefixNode(None, 0, b"")
        self._holding: set[PrefixNode] = set()  # the nodes that list blocks

    def add(self, sequence: Sequence) -> None:
        """Counts the sequence as a user of its prompt's whole blocks; the last token is never among them."""
        if not self.enabled:
            return
        num_blocks = (sequence.num_prompt_tokens - 1) // BLOCK_SIZE
        tokens = sequence.token_ids[: num_blocks * BLOCK_SIZE].tobytes()
        node, position = self.root, 0
        node.num_users += 1
        while position < len(tokens):
            key = tokens[position : position + BLOCK_BYTES]
            child = node.children.get(key)
            if child is None:
                child = PrefixNode(node, position // BLOCK_BYTES, tokens[position:])
                node.children[key] = child
            elif (common := _common_bytes(child.tokens, tokens, position)) < len(child.tokens):
                child = self._split(child, common)
            child.num_users += 1
            node, position = child, position + len(child.tokens)
        sequence.prefix_leaf = node

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What of the prompt is computed already, block by block from the start."""
        blocks: list[int] = []
        for node in _path(sequence.prefix_leaf):
            blocks += node.blocks
            if not node.is_computed:
                return PrefixMatch(blocks, node.owner is not None)
        return PrefixMatch(blocks, False)

    def admit(self, sequence: Sequence) -> None:
        """The sequence runs from now on and computes what nobody else does of its path."""
        for node in _path(sequence.prefix_leaf):
            node.num_running += 1
            if not node.is_computed and node.owner is None:
                node.owner = sequence

    def publish(self, sequence: Sequence) -> None:
        """Lists the prompt blocks that the sequence has computed since the last call."""
        leaf = sequence.prefix_leaf
        if leaf is None or sequence.num_tree_blocks == leaf.end:
            return
        num_computed = min(sequence.num_computed_tokens // BLOCK_SIZE, leaf.end)
        for node in _path(leaf):
            while sequence.num_tree_blocks < min(node.end, num_computed):
                if node.start + len(node.blocks) != sequence.num_tree_blocks:
                    return  # computed twice, after an eviction: these copies stay the sequence's own
                block = sequence.block_table[sequence.num_tree_blocks]
                self.pool.share(block)
                node.blocks.append(block)
                self._holding.add(node)
                sequence.num_tree_blocks += 1
            if node.is_computed:
                node.owner = None

    def suspend(self, sequence: Sequence) -> None:
        """The sequence runs no more (finished or preempted), so others may compute what it owned."""
        for node in _path(sequence.prefix_leaf):
            node.num_running -= 1
            if node.owner is sequence:
                node.owner = None
        sequence.num_tree_blocks = 0

    def remove(self, sequence: Sequence) -> None:
        """One user less on the path; nodes without users go, and their blocks with them."""
        node = sequence.prefix_leaf
        sequence.prefix_leaf = None
        while node is not None:
            node.num_users -= 1
            if node.num_users == 0:
                self._drop_blocks(node, 0)
                if node.parent is not None:
                    assert not node.children, "a prefix node without users has children"
                    del node.parent.children[node.tokens[:BLOCK_BYTES]]
            node = node.parent

    def evict(self, num_blocks: int, max_users: int | None = None) -> int:
        """Frees up to num_blocks blocks that no running sequence holds: fewest future users first, deepest first.

        max_users spares prefixes with more users than that. Returns how many were freed.
        """
        freed = 0
        nodes = [n for n in self._holding if max_users is None or n.num_users <= max_users]
        for node in sorted(nodes, key=lambda n: (n.num_users, -n.start)):
            keep = len(node.blocks)
            while keep > 0 and freed < num_blocks and self.pool.ref_count(node.blocks[keep - 1]) == 1:
                keep -= 1
                freed += 1
            self._drop_blocks(node, keep)
            if freed == num_blocks:
                break
        return freed

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts agree along the tree and every listed block is in use."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            assert node is self.root or node.num_users > 0, "a prefix node without users stayed"
            assert sum(c.num_users for c in node.children.values()) <= node.num_users, (
                "more users below than above"
            )
            assert node.num_running <= node.num_users, "more running than users"
            assert all(self.pool.ref_count(b) > 0 for b in node.blocks), "the prefix tree lists a free block"
            assert bool(node.blocks) == (node in self._holding), "the set of holding nodes is wrong"
            stack += node.children.values()

    def _split(self, node: PrefixNode, num_bytes: int) -> PrefixNode:
        """Cuts the node in two and returns the upper half; the lower keeps its identity, and with it its leaves."""
        assert node.parent is not None
        upper = PrefixNode(node.parent, node.start, node.tokens[:num_bytes])
        upper.num_users, upper.num_running, upper.owner = node.num_users, node.num_running, node.owner
        cut = num_bytes // BLOCK_BYTES
        upper.blocks, node.blocks = node.blocks[:cut], node.blocks[cut:]
        node.parent.children[node.tokens[:BLOCK_BYTES]] = upper
        node.parent, node.start, node.tokens = upper, upper.end, node.tokens[num_bytes:]
        upper.children[node.tokens[:BLOCK_BYTES]] = node
        if upper.is_computed:
            upper.owner = None
        for half in (upper, node):
            self._note_holding(half)
        return upper

    def _drop_blocks(self, node: PrefixNode, keep: int) -> None:
        for block in node.blocks[keep:]:
            self.pool.release(block)
        del node.blocks[keep:]
        self._note_holding(node)

    def _note_holding(self, node: PrefixNode) -> None:
        (self._holding.add if node.blocks else self._holding.discard)(node)


def _path(leaf: PrefixNode | None) -> list[PrefixNode]:
    """The nodes from the root's child down to the leaf."""
    path = []
    while leaf is not None and leaf.parent is not None:
        path.append(leaf)
        leaf = leaf.parent
    path.reverse()
    return path


def _common_bytes(edge: bytes, tokens: bytes, position: int) -> int:
    """How many bytes of whole blocks the edge shares with tokens[position:]; at least one block, by the child's key."""
    low, high = 1, min(len(edge), len(tokens) - position) // BLOCK_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        size = middle * BLOCK_BYTES
        if edge[:size] == tokens[position : position + size]:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_BYTES
