"""The batcher: which tokens are computed in the next step. One rule, no phases.

Each step spends a token budget moving every sequence's num_computed_tokens towards len(token_ids). Chunked prefill,
prefix hits, decoding and resumption after a preemption are that same rule. It knows blocks by number only and does
not touch tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.block_pool import BlockPool
from engine.config import BLOCK_SIZE
from engine.prefix import PrefixTree
from engine.request import EngineCounters
from engine.sequence import Sequence, SequenceStatus

ASSUMED_OUTPUT_TOKENS = 64  # of a row, until rows have finished
LEARNING_RATE = 0.05  # of the running mean of output lengths


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step computes: num_new_tokens of each sequence, and who lost its blocks for it."""

    items: list[tuple[Sequence, int]]
    preempted: list[Sequence]


class Scheduler:
    """Owns the queue of waiting sequences, the running ones and, through pool and tree, all KV blocks."""

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_cache: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, enable_prefix_cache)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self._expected_output = float(ASSUMED_OUTPUT_TOKENS)
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._counters = EngineCounters(num_kv_blocks=num_blocks)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences so that sharers of a prefix follow one another: in the order of their tokens."""
        ordered = sorted(sequences, key=lambda s: s.token_ids.tobytes())
        for sequence in ordered:
            self.tree.add(sequence)
        self.waiting.extend(ordered)

    def schedule(self) -> ScheduledStep:
        """Decides one step and takes the blocks it needs. Decodes first, then started prompts, then waiting rows."""
        had_waiting = bool(self.waiting)
        chosen: dict[Sequence, int] = {}
        preempted: list[Sequence] = []
        budget = self.max_num_batched_tokens
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed_tokens > 1):
            num_new = min(sequence.num_uncomputed_tokens, budget)
            if num_new == 0 or sequence.status is not SequenceStatus.RUNNING:
                continue
            if self._make_room(sequence, num_new, chosen, preempted):
                chosen[sequence] = num_new
                budget = self.max_num_batched_tokens - sum(chosen.values()) if preempted else budget - num_new
        if not preempted:
            self._admit_waiting(chosen, budget)
        self._count(chosen, preempted, had_waiting)
        return ScheduledStep(list(chosen.items()), preempted)

    def advance(self, step: ScheduledStep) -> None:
        """Notes that the step was computed, and lets others share the prompt blocks it filled."""
        for sequence, num_new in step.items:
            sequence.num_computed_tokens += num_new
            self.tree.publish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence leaves at once, with its blocks: finished, or cancelled in any state."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
            self._expected_output += LEARNING_RATE * (sequence.num_output_tokens - self._expected_output)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.tree.remove(sequence)

    def counters(self) -> EngineCounters:
        """The cumulative counts, with the present state."""
        return replace(
            self._counters,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_kv_blocks_used=self.pool.num_used,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every reference on every block is accounted for."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        held = sum(len(s.block_table) for s in self.running) + sum(len(n.blocks) for n in self.tree._holding)
        counted = sum(self.pool.ref_count(b) for b in range(self.pool.num_blocks))
        assert held == counted, f"{held} references are held, {counted} are counted"

    def _make_room(
        self, sequence: Sequence, num_new: int, chosen: dict[Sequence, int], preempted: list[Sequence]
    ) -> bool:
        """Gives the sequence blocks for num_new more tokens, preempting the youngest; False if that was itself."""
        while True:
            missing = _num_blocks(sequence.num_computed_tokens + num_new) - len(sequence.block_table)
            lacking = missing - self.pool.num_free
            if lacking <= 0 or self.tree.evict(lacking) == lacking:
                sequence.block_table += [self.pool.allocate() for _ in range(missing)]
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            preempted.append(youngest)
            chosen.pop(youngest, None)
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the blocks back; the sequence waits at the front and will compute its tokens again."""
        self._stop_running(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tree.suspend(sequence)
        for block in sequence.block_table:
            self.pool.release(block)
        sequence.block_table = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _admit_waiting(self, chosen: dict[Sequence, int], budget: int) -> None:
        """Admits rows while budget, slots and expected memory last, but not those whose prefix is being computed."""
        promised = sum(self._blocks_to_come(s) for s in self.running)
        held_back: list[Sequence] = []
        while self.waiting and budget > 0 and self._free_slots and len(held_back) < self.max_num_seqs:
            sequence = self.waiting.popleft()
            match = self.tree.match(sequence)
            if match.must_wait:
                held_back.append(sequence)
                continue
            for block in match.blocks:  # held before anything is evicted: they could be the first to go
                self.pool.share(block)
            num_new = min(len(sequence.token_ids) - len(match.blocks) * BLOCK_SIZE, budget)
            wanted = self._expected_blocks(sequence) - len(match.blocks)
            if not self._can_admit(wanted + promised, num_new):
                for block in match.blocks:
                    self.pool.release(block)
                self.waiting.appendleft(sequence)
                break
            promised += wanted - _num_blocks(num_new)
            self._admit(sequence, match.blocks, num_new)
            chosen[sequence] = num_new
            budget -= num_new
        self.waiting.extendleft(reversed(held_back))

    def _can_admit(self, wanted: int, num_new: int) -> bool:
        """Whether the expected blocks are free; with nothing running, whether this step's blocks can be had at all."""
        lacking = wanted - self.pool.num_free
        if lacking <= 0 or self.tree.evict(lacking, max_users=1) == lacking:
            return True
        if self.running:
            return False
        lacking = _num_blocks(num_new) - self.pool.num_free
        return lacking <= 0 or self.tree.evict(lacking) == lacking

    def _admit(self, sequence: Sequence, shared: list[int], num_new: int) -> None:
        own = [self.pool.allocate() for _ in range(_num_blocks(num_new))]
        sequence.block_table = shared + own
        sequence.num_tree_blocks = len(shared)
        sequence.num_computed_tokens = len(shared) * BLOCK_SIZE
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        self.tree.admit(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = time.monotonic()
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self._counters = replace(
                self._counters,
                num_prompt_tokens=self._counters.num_prompt_tokens + sequence.num_prompt_tokens,
                num_cached_tokens=self._counters.num_cached_tokens + sequence.num_cached_tokens,
            )

    def _expected_blocks(self, sequence: Sequence) -> int:
        """Blocks the sequence is expected to hold at its end: the mean output seen so far, within its own limit."""
        expected = max(self._expected_output, sequence.num_output_tokens + 1)
        return _num_blocks(min(sequence.num_prompt_tokens + int(expected), sequence.max_total_tokens))

    def _blocks_to_come(self, sequence: Sequence) -> int:
        return max(0, self._expected_blocks(sequence) - len(sequence.block_table))

    def _count(self, chosen: dict[Sequence, int], preempted: list[Sequence], had_waiting: bool) -> None:
        c = self._counters
        slots = self.pool.num_used * BLOCK_SIZE
        unfilled = sum(
            len(s.block_table) * BLOCK_SIZE - s.num_computed_tokens - chosen.get(s, 0) for s in self.running
        )
        self._counters = replace(
            c,
            num_steps=c.num_steps + 1,
            num_output_tokens=c.num_output_tokens
            + sum(num_new == s.num_uncomputed_tokens for s, num_new in chosen.items()),
            num_preemptions=c.num_preemptions + len(preempted),
            scheduled_tokens_while_waiting=c.scheduled_tokens_while_waiting
            + (sum(chosen.values()) if had_waiting else 0),
            budget_tokens_while_waiting=c.budget_tokens_while_waiting
            + (self.max_num_batched_tokens if had_waiting else 0),
            kv_waste_sum=c.kv_waste_sum + (unfilled / slots if slots else 0.0),
            kv_waste_samples=c.kv_waste_samples + (1 if slots else 0),
        )


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)
