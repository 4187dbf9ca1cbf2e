"""The prefix tree over all waiting and running requests: it is the prefix cache.

A node is a run of prompt tokens that the same requests share. It knows how many requests will still use it, so
nothing is left to an LRU: shared tokens are computed once (the others wait for them), kept while somebody will use
them, and freed after the last. Sharing is by tokens: of a block that two prompts share in part, the later one copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from gristmill.engine.batch.block_pool import BlockPool
from gristmill.engine.batch.prefix_node import TOKEN_BYTES, PrefixNode
from gristmill.engine.batch.sequence import Sequence
from gristmill.engine.config import BLOCK_SIZE


class PrefixMatch(NamedTuple):
    """How much of a prompt is computed, and the blocks that hold it: the last one in part, unless it ends a block.

    `must_wait`: another sequence is computing the next token.
    """

    num_tokens: int
    blocks: list[int]
    must_wait: bool


class PrefixTree:
    """Holds one reference on every block it lists. `enabled=False` matches and keeps nothing."""

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.root = PrefixNode(None, 0, b"")
        self.holding: set[PrefixNode] = set()  # the nodes that list blocks
        self._num_listed = [
            0
        ] * pool.num_blocks  # by how many nodes: one block can hold several nodes' tokens

    def add(self, sequence: Sequence) -> None:
        """Counts the sequence as a user of its prompt; the last token is not part of it: its logits are needed."""
        if not self.enabled:
            return
        tokens = sequence.prompt[:-TOKEN_BYTES]
        node, position = self.root, 0
        node.num_users += 1
        while position < len(tokens):
            key = tokens[position : position + TOKEN_BYTES]
            child = node.children.get(key)
            if child is None:
                child = PrefixNode(node, position // TOKEN_BYTES, tokens[position:])
                node.children[key] = child
            elif (common := common_tokens(child.tokens, tokens, position) * TOKEN_BYTES) < len(child.tokens):
                child = self._split(child, common)
            child.num_users += 1
            node, position = child, position + len(child.tokens)
        sequence.prefix_leaf = node

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What of the prompt is computed already, token by token from the start."""
        blocks: list[int] = []
        num_tokens = 0
        for node in path_to(sequence.prefix_leaf):
            if node.blocks:
                blocks[node.first_block :] = node.blocks
            num_tokens = node.filled_end
            if num_tokens < node.end:
                return PrefixMatch(num_tokens, blocks, node.owner is not None)
        return PrefixMatch(num_tokens, blocks, False)

    def admit(self, sequence: Sequence) -> None:
        """The sequence runs from now on and computes what nobody else does of its path."""
        for node in path_to(sequence.prefix_leaf):
            node.num_running += 1
            if node.owner is None and node.filled_end < node.end:
                node.owner = sequence

    def publish(self, sequence: Sequence) -> None:
        """Lists what the sequence has computed since the last call of the nodes that it owns."""
        computed, table = sequence.num_computed_tokens, sequence.block_table
        for node in path_to(sequence.prefix_leaf):
            end = min(node.end, computed)
            if node.owner is sequence and node.filled_end < end:
                kept = node.filled_end // BLOCK_SIZE - node.first_block  # its full blocks
                kept = min(kept, len(node.blocks))
                blocks = table[node.first_block + kept : -(-end // BLOCK_SIZE)].tolist()
                self._list(blocks)
                self._unlist(node.blocks[kept:])  # a part of a block, which the sequence had copied
                node.blocks[kept:] = blocks
                node.num_filled = end - node.start
                self.holding.add(node)
                if end == node.end:
                    node.owner = None
            if node.end > computed:
                return

    def suspend(self, sequence: Sequence) -> None:
        """The sequence runs no more (finished or preempted), so others may compute what it owned."""
        for node in path_to(sequence.prefix_leaf):
            node.num_running -= 1
            if node.owner is sequence:
                node.owner = None

    def remove(self, sequence: Sequence) -> None:
        """One user less on the path; nodes without users go, and their blocks with them."""
        node = sequence.prefix_leaf
        sequence.prefix_leaf = None
        while node is not None:
            node.num_users -= 1
            if node.num_users == 0:
                self._truncate(node, 0)
                if node.parent is not None:
                    assert not node.children, "a prefix node without users has children"
                    del node.parent.children[node.tokens[:TOKEN_BYTES]]
            node = node.parent

    def evict(self, num_blocks: int, max_waiting: int | None = None) -> int:
        """Frees up to num_blocks blocks that no running sequence holds: fewest users to come first, deepest first.

        max_waiting spares prefixes with more users to come than that. Returns how many were freed.
        """
        freed = 0
        nodes = [n for n in self.holding if max_waiting is None or n.num_waiting <= max_waiting]
        for node in sorted(nodes, key=lambda n: (n.num_waiting, -n.start)):
            keep = len(node.blocks)
            while keep > 0 and freed < num_blocks and self._is_held_only_here(node.blocks[keep - 1]):
                keep -= 1
                freed += self._num_listed[node.blocks[keep]] == 1
            self._truncate(node, keep)
            if freed == num_blocks:
                break
        return freed

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts agree along the tree and every listed block is in use."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            assert node is self.root or node.num_users > 0, "a prefix node without users stayed"
            below = sum(c.num_users for c in node.children.values())
            assert below <= node.num_users, "more users below than above"
            assert 0 <= node.num_running <= node.num_users, "more running than users"
            assert all(self.pool.ref_count(b) > 0 for b in node.blocks), "the prefix tree lists a free block"
            assert bool(node.blocks) == (node in self.holding), "the set of holding nodes is wrong"
            covered = -(-node.filled_end // BLOCK_SIZE) - node.first_block if node.num_filled else 0
            assert len(node.blocks) == covered, f"{len(node.blocks)} blocks for {covered}"
            stack += node.children.values()

    def _split(self, node: PrefixNode, num_bytes: int) -> PrefixNode:
        """Cuts the node in two and returns the upper half; the lower keeps its identity, and with it its leaves."""
        assert node.parent is not None
        upper = PrefixNode(node.parent, node.start, node.tokens[:num_bytes])
        upper.num_users, upper.num_running, upper.owner = node.num_users, node.num_running, node.owner
        upper.num_filled = min(node.num_filled, num_bytes // TOKEN_BYTES)
        node.parent.children[node.tokens[:TOKEN_BYTES]] = upper
        node.parent, node.start, node.tokens = upper, upper.end, node.tokens[num_bytes:]
        node.num_filled -= upper.num_filled
        upper.children[node.tokens[:TOKEN_BYTES]] = node
        covered = -(-upper.filled_end // BLOCK_SIZE) - upper.first_block if upper.num_filled else 0
        upper.blocks, rest = node.blocks[:covered], node.blocks[covered:]
        if node.num_filled and node.start % BLOCK_SIZE:  # both halves lie in one block
            rest.insert(0, upper.blocks[-1])
            self._list(rest[:1])
        node.blocks = rest
        if upper.filled_end == upper.end:
            upper.owner = None
        for half in (upper, node):
            self._note_holding(half)
        return upper

    def _truncate(self, node: PrefixNode, keep: int) -> None:
        """Leaves the node its first `keep` blocks."""
        if keep < len(node.blocks):
            self._unlist(node.blocks[keep:])
            del node.blocks[keep:]
            node.num_filled = max(0, (node.first_block + keep) * BLOCK_SIZE - node.start) if keep else 0
        self._note_holding(node)

    def _is_held_only_here(self, block: int) -> bool:
        """Whether only nodes of the tree hold the block."""
        return self.pool.ref_count(block) == self._num_listed[block]

    def _list(self, blocks: list[int]) -> None:
        self.pool.share(blocks)
        for block in blocks:
            self._num_listed[block] += 1

    def _unlist(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self._num_listed[block] -= 1

    def _note_holding(self, node: PrefixNode) -> None:
        (self.holding.add if node.blocks else self.holding.discard)(node)


def path_to(leaf: PrefixNode | None) -> list[PrefixNode]:
    """The nodes from the root's child down to the leaf."""
    path = []
    while leaf is not None and leaf.parent is not None:
        path.append(leaf)
        leaf = leaf.parent
    path.reverse()
    return path


def max_shared_tokens(prompts: Iterable[array[int]]) -> int:
    """Tokens of the prompts that need no computing when every distinct prefix is computed once: a perfect cache.

    That is all tokens less the nodes of the prompts' trie; but each prompt computes its last token itself, because
    the logits after it are wanted. In sorted order a prompt's longest common prefix is the one with its neighbour.
    """
    ordered = sorted(prompt.tobytes() for prompt in prompts)
    total = 0
    for previous, prompt in zip(ordered, ordered[1:], strict=False):
        total += min(common_tokens(previous, prompt), len(prompt) // TOKEN_BYTES - 1)
    return total


def common_tokens(a: bytes, b: bytes, position: int = 0) -> int:
    """How many whole tokens a shares with b[position:] from the start on; both are uint32 token ids."""
    low, high = 0, min(len(a), len(b) - position) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if (
            a[low * TOKEN_BYTES : middle * TOKEN_BYTES]
            == (b[position + low * TOKEN_BYTES : position + middle * TOKEN_BYTES])
        ):
            low = middle
        else:
            high = middle - 1
    return low
