"""A request on its way through the engine: its tokens, how many of them are computed, and the blocks that hold them."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

from engine.request import Request

if TYPE_CHECKING:
    from engine.prefix import PrefixNode
    from engine.stop import StopChecker


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable state of one request; the scheduler moves num_computed_tokens towards len(token_ids)."""

    __slots__ = (
        "arrival_s",
        "block_table",
        "finish_reason",
        "first_scheduled_s",
        "first_token_s",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_tree_blocks",
        "prefix_leaf",
        "request",
        "slot",
        "status",
        "stop_checker",
        "stop_text",
        "token_ids",
    )

    def __init__(self, request: Request, max_total_tokens: int, arrival_s: float) -> None:
        self.request = request
        self.token_ids: array[int] = request.prompt_token_ids[:]
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_total_tokens  # prompt and output; set by max_tokens, context and cache
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens taken from other sequences' blocks at first admission
        self.block_table: list[int] = []
        self.num_tree_blocks = 0  # leading blocks of the table that are the prefix tree's own
        self.prefix_leaf: PrefixNode | None = None
        self.slot = -1  # row of the runner's block-table array while running
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_checker: StopChecker | None = None
        self.stop_text: str | None = None  # the text up to a stop string, once one has been met
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache: 1 while decoding, more before."""
        return len(self.token_ids) - self.num_computed_tokens
