"""The batcher: which tokens are computed in the next step. One rule, no phases.

Each step spends a token budget moving every sequence's num_computed towards num_tokens. Chunked prefill, prefix hits,
decoding and resumption after a preemption are that same rule. It knows blocks by number only and touches no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.batch.admission import Expectations, ExpectedMemory
from gristmill.engine.batch.block_pool import BlockPool
from gristmill.engine.batch.prefix import PrefixMatch, PrefixTree
from gristmill.engine.batch.sequence import Sequence, SequenceStatus, Slots
from gristmill.engine.batch.waiting import WaitingRows
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.request import EngineCounters


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What one step computes: num_new[i] tokens of the sequence in slots[i], sharers of a prefix side by side.

    copies: [n, 2] int32, blocks whose contents are copied (from, to) before the step, in this order.
    """

    slots: NDArray[np.int64]
    num_new: NDArray[np.int64]
    copies: NDArray[np.int32]
    num_decodes: int
    num_preempted: int


class Scheduler:
    """Owns the waiting rows, the slots of the running ones and, through pool and tree, all KV blocks."""

    def __init__(
        self,
        num_blocks: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_cache: bool = True,
        max_request_tokens: int | None = None,
        static_batches: bool = False,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens, "every running row must be able to take a token a step"
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, enable_prefix_cache)
        self.slots = Slots(max_num_seqs, max_request_tokens or num_blocks * BLOCK_SIZE)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.expectations = Expectations(self.slots)
        self.waiting = WaitingRows(self.expectations.output_of, in_arrival_order=static_batches)
        self._static_seats = 0 if static_batches else None  # rows that may still join the present batch
        self._counters = EngineCounters(num_kv_blocks=num_blocks)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences; in which order they run is the batcher's choice."""
        rows = list(sequences)
        for sequence in rows:
            self.tree.add(sequence)
        self.waiting.add(rows)

    def schedule(self) -> ScheduledStep:
        """Decides one step and takes the blocks it needs. Decodes first, then started prompts, then waiting rows."""
        had_waiting = bool(self.waiting)
        num_new = np.zeros(self.max_num_seqs, np.int64)  # by slot
        num_preempted = self._take_decodes(num_new)
        num_preempted += self._take_started(num_new)
        copies: list[tuple[int, int]] = []
        if not (num_preempted and self.slots.num_running):  # a step that only preempts would compute nothing
            self._admit_waiting(num_new, copies)
        running = self.slots.running()
        chosen = running[num_new[running] > 0]
        step = ScheduledStep(
            chosen,
            num_new[chosen],
            np.array(copies, np.int32).reshape(-1, 2),
            int((self.slots.num_tokens[chosen] - self.slots.num_computed[chosen] == 1).sum()),
            num_preempted,
        )
        self._count(step, had_waiting)
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Notes that the step was computed, and lets others share the prompt tokens it filled."""
        before = self.slots.num_computed[step.slots]
        self.slots.num_computed[step.slots] += step.num_new
        if self.tree.enabled:
            for slot in step.slots[before < self.slots.num_prompt[step.slots] - 1].tolist():
                self.tree.publish(self.slots[slot])

    def finish(self, sequence: Sequence) -> None:
        """A running sequence has reached its end and leaves with its blocks; its length is learned from."""
        self.expectations.note_end(sequence)
        self.cancel(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """The sequence leaves at once, with its blocks, in whatever state it is."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.tree.remove(sequence)

    def counters(self) -> EngineCounters:
        """The cumulative counts, with the present state."""
        return replace(
            self._counters,
            num_running=self.slots.num_running,
            num_waiting=len(self.waiting),
            num_kv_blocks_used=self.pool.num_used,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every reference on every block is accounted for."""
        self.pool.check_integrity()
        self.tree.check_integrity()
        held = sum(len(s.block_table) for s in self.slots.running_sequences())
        held += sum(len(n.blocks) for n in self.tree.holding)
        counted = sum(self.pool.ref_count(b) for b in range(self.pool.num_blocks))
        assert held == counted, f"{held} references are held, {counted} are counted"

    def _take_decodes(self, num_new: NDArray[np.int64]) -> int:
        """A token for every row that has all others computed, and its block. Returns how many were preempted."""
        slots, num_preempted = self.slots, 0
        while True:
            running = slots.running()
            decodes = running[slots.num_tokens[running] - slots.num_computed[running] == 1]
            full = decodes[slots.num_computed[decodes] == slots.num_blocks[decodes] * BLOCK_SIZE]
            if self._can_allocate(len(full)):
                break
            self._preempt(self._youngest())
            num_preempted += 1
        if len(full):
            slots.add_blocks(full, np.ones(len(full), np.int64), self.pool.allocate(len(full)))
        num_new[decodes] = 1
        return num_preempted

    def _take_started(self, num_new: NDArray[np.int64]) -> int:
        """Goes on with prompts that were begun, the oldest first. Returns how many rows were preempted for it."""
        slots, num_preempted = self.slots, 0
        running = slots.running()
        started = running[slots.num_tokens[running] - slots.num_computed[running] > 1]
        for slot in started[np.argsort(slots.admission[started])].tolist():
            while slots.sequences[slot] is not None:
                budget = self.max_num_batched_tokens - int(num_new.sum())
                count = min(int(slots.num_tokens[slot] - slots.num_computed[slot]), budget)
                if count == 0:
                    return num_preempted
                missing = num_blocks_of(int(slots.num_computed[slot]) + count) - int(slots.num_blocks[slot])
                if self._can_allocate(missing):
                    if missing > 0:
                        slots.add_blocks(np.array([slot]), np.array([missing]), self.pool.allocate(missing))
                    num_new[slot] = count
                    break
                youngest = self._youngest()
                num_new[youngest.slot] = 0
                self._preempt(youngest)
                num_preempted += 1
        return num_preempted

    def _can_allocate(self, count: int) -> bool:
        """Makes room for so many blocks, by dropping prefixes that nobody holds if need be."""
        lacking = count - self.pool.num_free
        return lacking <= 0 or self.tree.evict(lacking) == lacking

    def _youngest(self) -> Sequence:
        running = self.slots.running()
        return self.slots[int(running[np.argmax(self.slots.admission[running])])]

    def _preempt(self, sequence: Sequence) -> None:
        """Takes the blocks back; the sequence waits before all others and will compute its tokens again."""
        self.expectations.note_preemption(sequence)
        self._stop_running(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.put_back([sequence])

    def _stop_running(self, sequence: Sequence) -> None:
        self.tree.suspend(sequence)
        self.pool.release(sequence.block_table)
        self.slots.vacate(sequence)

    def _admit_waiting(self, num_new: NDArray[np.int64], copies: list[tuple[int, int]]) -> None:
        """Admits rows while budget, slots and memory last, but not those whose next token another one computes."""
        budget = self.max_num_batched_tokens - int(num_new.sum())
        if self._static_seats is not None and self.slots.num_running == 0:
            self._static_seats = self.max_num_seqs
        memory: ExpectedMemory | None = None
        held_back: list[Sequence] = []
        while self.waiting and budget > 0 and self.slots.num_free and len(held_back) < self.max_num_seqs:
            if self._static_seats == 0:
                break
            sequence = self.waiting.pop()
            match = self.tree.match(sequence)
            if match.must_wait:
                held_back.append(sequence)
                continue
            memory = memory or self.expectations.memory(self.pool.num_used)
            count = self._admit(sequence, match, budget, memory, copies)
            if not count:
                held_back.append(sequence)
                if self._static_seats is not None:
                    self._static_seats = 0
                break
            num_new[sequence.slot] = count
            budget -= count
            if self._static_seats is not None:
                self._static_seats -= 1
        self.waiting.put_back(held_back)

    def _admit(
        self,
        sequence: Sequence,
        match: PrefixMatch,
        budget: int,
        memory: ExpectedMemory,
        copies: list[tuple[int, int]],
    ) -> int:
        """Gives the sequence a slot and blocks, if memory will last; how many tokens it may compute in this step."""
        num_shared = match.num_tokens // BLOCK_SIZE
        shared, partial = match.blocks[:num_shared], match.blocks[num_shared:]
        count = min(sequence.num_tokens - match.num_tokens, budget)
        own = num_blocks_of(sequence.num_tokens) - num_shared
        now = num_blocks_of(match.num_tokens + count) - num_shared
        remaining = self.expectations.output_of(sequence)
        self.pool.share(match.blocks)  # held before anything is evicted: they could be the first to go
        fits = self._will_fit(own, now, remaining, memory)
        if fits:
            blocks = self.pool.allocate(now)
            memory.add(own, remaining)
            copies += [(source, int(blocks[0])) for source in partial]
            table = np.concatenate([np.array(shared, np.int32), blocks])
            self._start(sequence, table, num_shared, match.num_tokens)
            self.pool.release(partial)
            return count
        self.pool.release(match.blocks)
        if partial and not self.slots.num_running:  # the block to copy from is the one too many
            whole = PrefixMatch(num_shared * BLOCK_SIZE, shared, match.must_wait)
            return self._admit(sequence, whole, budget, memory, copies)
        return 0

    def _start(self, sequence: Sequence, table: NDArray[np.int32], num_shared: int, num_cached: int) -> None:
        self.slots.occupy(sequence, table, num_shared, num_cached)
        self.tree.admit(sequence)
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = time.monotonic()
            sequence.num_cached_tokens = num_cached
            self._counters = replace(
                self._counters,
                num_prompt_tokens=self._counters.num_prompt_tokens + sequence.num_prompt_tokens,
                num_cached_tokens=self._counters.num_cached_tokens + num_cached,
            )

    def _will_fit(self, own: int, now: int, remaining: int, memory: ExpectedMemory) -> bool:
        """Whether memory lasts to the row's expected end; with nothing running, whether this step's can be had."""
        if not self.slots.num_running:
            return self._can_allocate(now)
        lacking = int(np.ceil(memory.peak_with(own, remaining))) - self.pool.num_blocks
        if lacking > 0:
            freed = self.tree.evict(lacking, max_waiting=0)
            memory.num_used -= freed
            if freed < lacking:
                return False
        lacking = now - self.pool.num_free
        return lacking <= 0 or self.tree.evict(lacking, max_waiting=0) == lacking

    def _count(self, step: ScheduledStep, had_waiting: bool) -> None:
        c, s, running = self._counters, self.slots, self.slots.running()
        allocated = self.pool.num_used * BLOCK_SIZE
        computed = s.num_computed[step.slots]
        unfilled = (s.num_blocks[running] * BLOCK_SIZE - s.num_computed[running]).sum() - step.num_new.sum()
        prompt_left = np.maximum(s.num_prompt[step.slots] - computed, 0)
        scheduled = int(step.num_new.sum())
        self._counters = replace(
            c,
            num_steps=c.num_steps + 1,
            num_computed_prompt_tokens=c.num_computed_prompt_tokens
            + int(np.minimum(prompt_left, step.num_new).sum()),
            num_output_tokens=c.num_output_tokens
            + int((s.num_tokens[step.slots] - computed == step.num_new).sum()),
            num_preemptions=c.num_preemptions + step.num_preempted,
            scheduled_tokens_while_waiting=c.scheduled_tokens_while_waiting + had_waiting * scheduled,
            budget_tokens_while_waiting=c.budget_tokens_while_waiting
            + had_waiting * self.max_num_batched_tokens,
            kv_waste_sum=c.kv_waste_sum + (float(unfilled) / allocated if allocated else 0.0),
            kv_waste_samples=c.kv_waste_samples + (1 if allocated else 0),
        )


def num_blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)
