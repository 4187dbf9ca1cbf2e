"""Drives a Scheduler as the engine does, with a made-up model, and checks every invariant after every step."""

from __future__ import annotations

from array import array

from engine.request import Request, SamplingParams
from engine.scheduler import ScheduledStep, Scheduler
from engine.sequence import Sequence, SequenceStatus


def build_sequence(prompt, max_tokens=4, request_id=0, max_total=1 << 30):
    request = Request(request_id, array("I", prompt), SamplingParams(max_tokens=max_tokens))
    return Sequence(request, min(len(prompt) + max_tokens, max_total), arrival_s=0.0)


def run_step(scheduler: Scheduler) -> ScheduledStep:
    """One step: schedule, check, compute, append a token to whoever is due one, finish whoever is done."""
    step = scheduler.schedule()
    assert sum(n for _, n in step.items) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    scheduled = [s for s, _ in step.items]
    assert len(set(map(id, scheduled))) == len(scheduled)
    for sequence, num_new in step.items:
        assert sequence.status is SequenceStatus.RUNNING
        assert 0 < num_new <= sequence.num_uncomputed_tokens
        assert len(sequence.block_table) * 16 >= sequence.num_computed_tokens + num_new
    assert len({s.slot for s in scheduler.running}) == len(scheduler.running)
    due = [s for s, n in step.items if n == s.num_uncomputed_tokens]
    scheduler.advance(step)
    scheduler.check_integrity()
    for sequence in due:
        sequence.token_ids.append(7)
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            scheduler.finish(sequence)
    scheduler.check_integrity()
    return step


def run_to_end(scheduler: Scheduler, max_steps=10_000) -> list[ScheduledStep]:
    """Steps until nothing is left; every step must compute something."""
    steps = []
    while scheduler.waiting or scheduler.running:
        step = run_step(scheduler)
        assert step.items, "a step computed nothing while rows were left"
        steps.append(step)
        assert len(steps) < max_steps
    assert scheduler.pool.num_used == 0, "blocks are still held after the last sequence left"
    return steps
