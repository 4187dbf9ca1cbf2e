"""What could be saved at best, against a brute-force count; and that the batcher saves it, with little memory too."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.engine.batch.prefix import max_shared_tokens
from gristmill.engine.batch.scheduler import Scheduler
from tests.engine.simulation import build_sequence

prompt = st.lists(st.integers(1, 2), min_size=1, max_size=9)


@given(st.lists(prompt, min_size=1, max_size=12))
def test_the_theory_equals_a_count_of_distinct_prefixes(prompts):
    seen: set[tuple[int, ...]] = set()
    computed = 0
    for tokens in sorted(prompts):
        computed += 1  # the last one, for its logits
        computed += sum(tuple(tokens[:size]) not in seen for size in range(1, len(tokens)))
        seen |= {tuple(tokens[:size]) for size in range(1, len(tokens) + 1)}
    total = sum(map(len, prompts))
    assert max_shared_tokens([array("I", p) for p in prompts]) == total - computed


def workload(name):
    """About 200 prompts with outputs: one prefix for all, or a system prompt above documents above questions."""
    rng = random.Random(5)
    tokens = lambda low, high: [rng.randint(5, 400) for _ in range(rng.randint(low, high))]  # noqa: E731
    system = tokens(203, 203)
    if name == "one prefix":
        prompts = [system + tokens(20, 120) for _ in range(200)]
    else:
        documents = [tokens(150, 300) for _ in range(20)]
        prompts = [system + document + tokens(10, 60) for document in documents for _ in range(10)]
    if name == "shuffled":
        rng.shuffle(prompts)
    return prompts, [rng.randint(8, 60) for _ in prompts]


@pytest.mark.parametrize("name", ["one prefix", "multi-level", "shuffled"])
@pytest.mark.parametrize("share, least", [(1.0, 0.99), (0.3, 0.97), (0.1, 0.90)])
def test_the_batcher_saves_what_can_be_saved(name, share, least):
    prompts, outputs = workload(name)
    sizes = [-(-(len(p) + n) // 16) for p, n in zip(prompts, outputs, strict=True)]
    scheduler = Scheduler(
        max(int(sum(sizes) * share), max(sizes) + 1), max_num_seqs=64, max_num_batched_tokens=512
    )
    scheduler.add([build_sequence(p, n, i) for i, (p, n) in enumerate(zip(prompts, outputs, strict=True))])
    slots = scheduler.slots
    while scheduler.waiting or slots.num_running:
        step = scheduler.schedule()
        due = step.slots[slots.num_tokens[step.slots] - slots.num_computed[step.slots] == step.num_new]
        scheduler.advance(step)
        slots.append_tokens(due, np.full(len(due), 7), now_s=0.0)
        for slot in due[slots.num_tokens[due] >= slots.max_total[due]].tolist():
            scheduler.finish(slots[slot])
    counters = scheduler.counters()
    saved = counters.num_prompt_tokens - counters.num_computed_prompt_tokens
    assert saved >= least * max_shared_tokens([array("I", p) for p in prompts])
    assert scheduler.pool.num_used == 0
