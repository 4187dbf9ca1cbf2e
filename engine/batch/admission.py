"""Whether memory will last when one more row runs: the peak of KV blocks over the time to come.

Rows end at different times, so the peak lies below the sum of their final sizes. It is computed from each row's
expected end: up to then it grows by a block every BLOCK_SIZE steps, then its own blocks are free again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.batch.output_lengths import OutputLengths
from gristmill.engine.batch.sequence import Sequence, Slots
from gristmill.engine.config import BLOCK_SIZE

MAX_GROUPS = 256  # whose output lengths are remembered


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
