"""A node of the prefix tree: a run of prompt tokens that the same requests share, and who computes it."""

from __future__ import annotations

from gristmill.engine.config import BLOCK_SIZE

TOKEN_BYTES = 4  # a token id as uint32


class PrefixNode:
    """A run of tokens. Its first `num_filled` ones are in the cache, in `blocks`.

    `blocks` begin with the block that holds the token `start`. Where that is not a block's first token, the block holds
    the parents' tokens too: a node's own version of a block is complete up to the node's tokens.
    """

    __slots__ = (
        *("blocks", "children", "num_filled", "num_running", "num_users"),
        *("owner", "parent", "start", "tokens"),
    )

    def __init__(self, parent: PrefixNode | None, start: int, tokens: bytes) -> None:
        self.parent = parent
        self.start = start  # tokens before this node
        self.tokens = tokens
        self.children: dict[bytes, PrefixNode] = {}  # by their first token
        self.blocks: list[int] = []
        self.num_filled = 0
        self.num_users = 0  # waiting and running requests whose prompt begins with this path
        self.num_running = 0
        self.owner: object = None  # the running Sequence that is computing the missing tokens

    @property
    def end(self) -> int:
        """Tokens up to and including this node."""
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def filled_end(self) -> int:
        """Tokens up to the last one of this node that is in the cache."""
        return self.start + self.num_filled

    @property
    def first_block(self) -> int:
        """Which block of a prompt blocks[0] is."""
        return self.start // BLOCK_SIZE

    @property
    def num_waiting(self) -> int:
        """Users to come."""
        return self.num_users - self.num_running
