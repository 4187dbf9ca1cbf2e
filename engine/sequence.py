"""A request on its way through the engine: waiting, running in a slot, or finished.

While it runs, its tokens, its progress and its blocks are in its slot's row of the arrays of `Slots`; the properties
here read them there. In between (before it runs, after a preemption, at its end) it keeps its output itself.
"""

from __future__ import annotations

from array import array
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.request import Request

if TYPE_CHECKING:
    from engine.prefix import PrefixNode
    from engine.slots import Slots
    from engine.stop import StopChecker


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one request."""

    __slots__ = (
        *("arrival_s", "error", "finish_reason", "finished_s", "first_scheduled_s", "first_token_s"),
        *("max_total_tokens", "num_cached_tokens", "num_prompt_tokens", "output", "prefix_leaf", "prompt"),
        *("request", "slot", "slots", "status", "stop_checker", "stop_text"),
    )

    def __init__(self, request: Request, max_total_tokens: int, arrival_s: float) -> None:
        self.request = request
        self.prompt = request.prompt_token_ids.tobytes()  # sorts and compares faster than an array
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_total_tokens = max_total_tokens  # prompt and output; set by max_tokens, context and cache
        self.num_cached_tokens = 0  # prompt tokens taken from other sequences' blocks at first admission
        self.output: array[int] = array("I")  # what was generated when it last left a slot
        self.prefix_leaf: PrefixNode | None = None
        self.slots: Slots | None = None  # while running
        self.slot = -1
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.error: tuple[str, str] | None = None  # (code, message) of one that can't be run
        self.stop_checker: StopChecker | None = None
        self.stop_text: str | None = None  # the text up to a stop string, once one has been met
        self.arrival_s = arrival_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output so far. [num_tokens]"""
        if self.slots is not None:
            return self.slots.tokens[self.slot, : self.slots.num_tokens[self.slot]]
        return np.frombuffer(self.prompt + self.output.tobytes(), np.int32)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        if self.slots is not None:
            return int(self.slots.num_tokens[self.slot])
        return self.num_prompt_tokens + len(self.output)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in its blocks."""
        return 0 if self.slots is None else int(self.slots.num_computed[self.slot])

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache: 1 while decoding, more before."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def block_table(self) -> NDArray[np.int32]:
        """The ids of its blocks, in order. [num_blocks]"""
        if self.slots is None:
            return np.empty(0, np.int32)
        return self.slots.tables[self.slot, : self.slots.num_blocks[self.slot]]
