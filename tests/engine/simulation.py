"""Drives a Scheduler as the engine does, with a made-up model, and checks every invariant after every step."""

from __future__ import annotations

from array import array
from weakref import WeakKeyDictionary

import numpy as np

from gristmill.engine.batch.scheduler import ScheduledStep, Scheduler
from gristmill.engine.batch.sequence import Sequence, SequenceStatus
from gristmill.engine.request import Request, SamplingParams

# What the blocks of each scheduler hold, as if they were on a device: the tokens up to and including each one.
CONTENTS: WeakKeyDictionary[Scheduler, dict[tuple[int, int], bytes]] = WeakKeyDictionary()


def build_sequence(prompt, max_tokens=4, request_id=0, max_total=1 << 30):
    request = Request(request_id, array("I", prompt), SamplingParams(max_tokens=max_tokens))
    return Sequence(request, min(len(prompt) + max_tokens, max_total), arrival_s=0.0)


def run_step(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """One step: schedule, check, compute, append a token to whoever is due one, finish whoever is done.

    Returns the step's sequences with their numbers of new tokens.
    """
    step, slots = scheduler.schedule(), scheduler.slots
    items = [(slots[slot], n) for slot, n in zip(step.slots.tolist(), step.num_new.tolist(), strict=True)]
    assert step.num_new.sum() <= scheduler.max_num_batched_tokens
    assert slots.num_running + slots.num_free == scheduler.max_num_seqs
    assert len(set(step.slots.tolist())) == len(step.slots)
    prompts = [s.prompt for s, _ in items]
    assert prompts == sorted(prompts), "sharers are not neighbours"
    for sequence, num_new in items:
        assert sequence.status is SequenceStatus.RUNNING
        assert 0 < num_new <= sequence.num_uncomputed_tokens
        assert len(sequence.block_table) * 16 >= sequence.num_computed_tokens + num_new
        assert len(set(sequence.block_table.tolist())) == len(sequence.block_table)
    CONTENTS.setdefault(scheduler, {})
    check_contents(CONTENTS[scheduler], step, items)
    due = [s for s, n in items if n == s.num_uncomputed_tokens]
    scheduler.advance(step)
    scheduler.check_integrity()
    if due:
        slots.append_tokens(np.array([s.slot for s in due]), np.full(len(due), 7), now_s=0.0)
    for sequence in due:
        if sequence.num_tokens >= sequence.max_total_tokens:
            scheduler.finish(sequence)
    scheduler.check_integrity()
    return items


def check_contents(contents: dict[tuple[int, int], bytes], step: ScheduledStep, items) -> None:
    """Plays the step on a cache of token histories: whatever a row takes as computed must be its own prefix."""
    for source, target in step.copies.tolist():
        for offset in range(16):
            contents[target, offset] = contents.get((source, offset), b"")
    for sequence, num_new in items:
        history, table = sequence.token_ids.tobytes(), sequence.block_table.tolist()
        computed = sequence.num_computed_tokens
        for position in range(computed + num_new):
            place, want = (table[position // 16], position % 16), history[: 4 * position + 4]
            if position >= computed:
                contents[place] = want
            assert contents.get(place) == want, f"token {position} of {computed} computed ones is another's"


def run_to_end(scheduler: Scheduler, max_steps=10_000) -> list[list[tuple[Sequence, int]]]:
    """Steps until nothing is left; every step must compute something."""
    steps = []
    while scheduler.waiting or scheduler.slots.num_running:
        items = run_step(scheduler)
        assert items, "a step computed nothing while rows were left"
        steps.append(items)
        assert len(steps) < max_steps
    assert scheduler.pool.num_used == 0, "blocks are still held after the last sequence left"
    return steps
