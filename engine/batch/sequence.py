"""Requests on their way through the engine: waiting, running in a slot, or finished; and the slots as arrays.

A sequence occupies a slot, a row of the arrays of `Slots`, from its admission to its end or preemption: a step reads
and writes the arrays without a Python loop over rows, and the properties of `Sequence` read them there. Outside of a
slot it keeps its output itself. Free slots' rows hold leftovers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from dataclasses import fields
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.batch.prefix_node import PrefixNode
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.request import Request, SamplingParams
from gristmill.engine.text.stop import StopChecker

# The numbers of SamplingParams, a column each; what a new one does is said in model/sampler.py.
SAMPLING_NUMBERS = {
    field.name: str(field.type) for field in fields(SamplingParams) if field.type in ("float", "int")
}
SAMPLING_DTYPE = np.dtype([*SAMPLING_NUMBERS.items(), ("kind", np.int8), ("seed", np.uint64)])


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


class Slots:
    """num_tokens counts prompt and output; num_computed those in the cache; num_shared blocks are other rows' too."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        max_blocks = -(-max_tokens // BLOCK_SIZE)
        self.tokens = np.zeros((num_slots, max_tokens), np.int32)
        self.tables = np.zeros((num_slots, max_blocks), np.int32)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.num_shared = np.zeros(num_slots, np.int64)
        self.max_total = np.zeros(num_slots, np.int64)
        self.group = np.zeros(num_slots, np.int64)
        self.admission = np.zeros(num_slots, np.int64)  # the larger, the younger
        self.ignore_eos = np.zeros(num_slots, bool)
        self.needs_checks = np.zeros(num_slots, bool)  # stop strings or tokens: looked at one by one
        self.has_penalties = np.zeros(num_slots, bool)
        self.sampling = np.zeros(num_slots, SAMPLING_DTYPE)
        self.first_token_s = np.zeros(num_slots, np.float64)  # nan before the first token
        self.sequences: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._in_order: list[tuple[bytes, int]] = []
        self._num_admissions = 0
        self._running: NDArray[np.int64] | None = None
        self.version = 0  # changes with the set of running sequences

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Slots with one."""
        return len(self._in_order)

    def running(self) -> NDArray[np.int64]:
        """The occupied slots, sorted by their prompts' bytes: sharers of a prefix are neighbours."""
        if self._running is None:
            self._running = np.array([slot for _, slot in self._in_order], np.int64)
        return self._running

    def running_sequences(self) -> list[Sequence]:
        """The sequences of `running()`, in its order."""
        return [self[slot] for _, slot in self._in_order]

    def __getitem__(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is free"
        return sequence

    def occupy(
        self, sequence: Sequence, blocks: NDArray[np.int32], num_shared: int, num_computed: int
    ) -> None:
        """Gives the sequence a slot. blocks: its table, of which the first num_shared belong to others too."""
        slot = self._free.pop()
        size = sequence.num_prompt_tokens
        self.tokens[slot, :size] = np.frombuffer(sequence.prompt, np.int32)
        self.tokens[slot, size : size + len(sequence.output)] = sequence.output
        self.num_tokens[slot] = size + len(sequence.output)
        self.num_prompt[slot] = size
        self.num_computed[slot] = num_computed
        self.tables[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.num_shared[slot] = num_shared
        self.max_total[slot] = sequence.max_total_tokens
        self.group[slot] = sequence.request.group
        self.admission[slot] = self._num_admissions
        self.first_token_s[slot] = np.nan if sequence.first_token_s is None else sequence.first_token_s
        self._set_sampling(slot, sequence)
        sequence.slots, sequence.slot = self, slot
        sequence.status = SequenceStatus.RUNNING
        self.sequences[slot] = sequence
        insort(self._in_order, (sequence.prompt, slot))
        self._num_admissions += 1
        self._change()

    def vacate(self, sequence: Sequence) -> None:
        """Takes the slot back; the sequence keeps its output. Its blocks are the caller's to release."""
        slot = sequence.slot
        output = self.tokens[slot, self.num_prompt[slot] : self.num_tokens[slot]]
        sequence.output = array("I", output.tobytes())
        first_token_s = float(self.first_token_s[slot])
        sequence.first_token_s = None if np.isnan(first_token_s) else first_token_s
        sequence.slots, sequence.slot = None, -1
        self.sequences[slot] = None
        del self._in_order[bisect_left(self._in_order, (sequence.prompt, slot))]
        self._free.append(slot)
        self._change()

    def add_blocks(
        self, slots: NDArray[np.int64], counts: NDArray[np.int64], blocks: NDArray[np.int32]
    ) -> None:
        """Appends counts[i] of the blocks to the table of slots[i]. counts > 0; no slot twice."""
        rows = np.repeat(slots, counts)
        offsets = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.tables[rows, np.repeat(self.num_blocks[slots], counts) + offsets] = blocks
        self.num_blocks[slots] += counts

    def append_tokens(self, slots: NDArray[np.int64], tokens: NDArray[np.int64], now_s: float) -> None:
        """One more token for each of these slots."""
        self.tokens[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1
        first = slots[np.isnan(self.first_token_s[slots])]
        self.first_token_s[first] = now_s

    def _change(self) -> None:
        self._running = None
        self.version += 1

    def _set_sampling(self, slot: int, sequence: Sequence) -> None:
        p = sequence.request.sampling
        self.ignore_eos[slot] = p.ignore_eos
        self.needs_checks[slot] = bool(p.stop_token_ids) or sequence.stop_checker is not None
        self.has_penalties[slot] = p.has_penalties
        numbers = (getattr(p, name) for name in SAMPLING_NUMBERS)
        self.sampling[slot] = (*numbers, p.kind, sequence.request.seed & 0xFFFFFFFFFFFFFFFF)
