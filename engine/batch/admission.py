"""Whether memory will last when one more row runs: the peak of KV blocks over the time to come.

Rows end at different times, so the peak lies below the sum of their final sizes. It is computed from each row's
expected end: up to then it grows by a block every BLOCK_SIZE steps, then its own blocks are free again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.batch.sequence import Sequence, Slots
from gristmill.engine.config import BLOCK_SIZE

MAX_GROUPS = 256  # whose output lengths are remembered
ASSUMED_TOKENS = 64  # of a row, until enough rows have ended
MIN_SAMPLES = 8
MAX_SAMPLES = 1024  # the latest ones
MIN_QUANTILE, MAX_QUANTILE = 0.6, 0.98
_RAISE = 0.5  # of what is missing to MAX_QUANTILE, at a preemption
_LOWER = 0.002  # of what is over MIN_QUANTILE, at an end


class OutputLengths:
    """How long the outputs of one group's rows are, learned from the rows that have ended.

    A prediction is a quantile of the lengths seen, among those longer than what the row has already written. The
    quantile corrects itself: each preemption shows that rows were taken for too short and raises it; each end lowers
    it a little.
    """

    def __init__(self) -> None:
        self.quantile = MIN_QUANTILE
        self._ring = np.zeros(MAX_SAMPLES, np.int64)
        self._num_seen = 0
        self._sorted: NDArray[np.int64] | None = None

    def note_end(self, num_tokens: int) -> None:
        """A row ended after so many tokens."""
        self._ring[self._num_seen % MAX_SAMPLES] = num_tokens
        self._num_seen += 1
        self._sorted = None
        self.quantile -= _LOWER * (self.quantile - MIN_QUANTILE)

    def note_preemption(self) -> None:
        """Memory ran out: rows were expected to be shorter than they are."""
        self.quantile += _RAISE * (MAX_QUANTILE - self.quantile)

    def predict(self, written: NDArray[np.int64]) -> NDArray[np.int64]:
        """The expected lengths of rows that have written so many tokens: more than that, always."""
        if self._num_seen < MIN_SAMPLES:
            return np.maximum(ASSUMED_TOKENS, written * 2)
        if self._sorted is None:
            self._sorted = np.sort(self._ring[: min(self._num_seen, MAX_SAMPLES)])
        shorter = np.searchsorted(self._sorted, written, side="right")
        longer = len(self._sorted) - shorter
        index = shorter + (longer * self.quantile).astype(np.int64)
        seen = self._sorted[np.minimum(index, len(self._sorted) - 1)]
        return np.where(longer >= MIN_SAMPLES, seen, np.maximum(seen, written * 3 // 2 + 1))


class ExpectedMemory:
    """The running rows' blocks over time. remaining: steps to each row's end; own: blocks that its end frees."""

    def __init__(self, num_used: int, remaining: NDArray[np.int64], own: NDArray[np.int64]) -> None:
        order = np.argsort(remaining, kind="stable")
        self._remaining, self._own = remaining[order].astype(np.float64), own[order].astype(np.float64)
        self.num_used = float(num_used)

    def peak_with(self, num_blocks: int, remaining: int) -> float:
        """The peak if a row joins that takes num_blocks now and ends after `remaining` steps. O(rows)"""
        at = int(np.searchsorted(self._remaining, remaining))
        steps = np.insert(self._remaining, at, remaining)
        own = np.insert(self._own, at, num_blocks)
        num_alive = np.arange(len(steps), 0, -1)
        freed = np.cumsum(own) - own  # by the rows that end earlier
        grown = num_alive * steps / BLOCK_SIZE
        return float((self.num_used + num_blocks - freed + grown).max())

    def add(self, num_blocks: int, remaining: int) -> None:
        """The row has joined."""
        at = int(np.searchsorted(self._remaining, remaining))
        self._remaining = np.insert(self._remaining, at, remaining)
        self._own = np.insert(self._own, at, num_blocks)
        self.num_used += num_blocks


class Expectations:
    """What the rows' ends so far let expect of those that run and wait, job by job."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lengths: dict[int, OutputLengths] = {}  # by Request.group

    def lengths_of(self, group: int) -> OutputLengths:
        """What is known of a group; the oldest of many groups are forgotten."""
        if group not in self._lengths:
            self._lengths[group] = OutputLengths()
            if len(self._lengths) > MAX_GROUPS:
                del self._lengths[next(iter(self._lengths))]
        return self._lengths[group]

    def note_end(self, sequence: Sequence) -> None:
        """A running sequence has reached its end by itself."""
        self.lengths_of(sequence.request.group).note_end(sequence.num_output_tokens)

    def note_preemption(self, sequence: Sequence) -> None:
        """Memory did not last."""
        self.lengths_of(sequence.request.group).note_preemption()

    def output_of(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence is expected to generate yet."""
        most = sequence.max_total_tokens - sequence.num_tokens
        if sequence.request.sampling.ignore_eos:
            return most
        written = sequence.num_output_tokens
        expected = self.lengths_of(sequence.request.group).predict(np.array([written]))[0] - written
        return max(1, min(int(expected), most))

    def memory(self, num_used: int) -> ExpectedMemory:
        """The running rows' blocks over time; num_used: blocks in use now."""
        slots, running = self._slots, self._slots.running()
        tokens = slots.num_tokens[running]
        written = tokens - slots.num_prompt[running]
        most = slots.max_total[running] - tokens
        expected = np.zeros(len(running), np.int64)
        for group in np.unique(slots.group[running]).tolist():
            members = slots.group[running] == group
            expected[members] = self.lengths_of(group).predict(written[members]) - written[members]
        remaining = np.where(slots.ignore_eos[running], most, np.clip(expected, 1, np.maximum(most, 1)))
        held = slots.num_blocks[running]
        wanted = np.maximum(held, -(-tokens // BLOCK_SIZE))  # a prompt that is not all computed gets more
        num_used += int((wanted - held).sum())
        return ExpectedMemory(num_used, remaining, wanted - slots.num_shared[running])
