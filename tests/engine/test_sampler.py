"""Sampling: what each parameter leaves, and that a row's choice does not depend on its neighbours."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from gristmill.engine.batch.sequence import Sequence, Slots
from gristmill.engine.model.sampler import sample, sampling_rows, uniform
from gristmill.engine.request import Request, SamplingParams

VOCAB = 50


def row(seed=0, prompt=(1, 2), output=(), **params):
    sequence = Sequence(Request(0, array("I", prompt), SamplingParams(**params), seed), 1000, 0.0)
    sequence.output.extend(output)
    return sequence


def choose(logits, rows):
    """The tokens that the sampler chooses for these rows, each in a slot of its own."""
    slots = Slots(len(rows), max_tokens=64)
    for sequence in rows:
        slots.occupy(sequence, np.zeros(0, np.int32), num_shared=0, num_computed=0)
    chosen = np.array([s.slot for s in rows])
    tokens = sample(logits, sampling_rows(slots, chosen)).tolist()
    for sequence in rows:
        slots.vacate(sequence)
    return tokens


def logits(*values, num_rows=1):
    one = torch.full((VOCAB,), -20.0)
    one[: len(values)] = torch.tensor(values)
    return one.repeat(num_rows, 1)


def draws(values, count=4000, **params):
    """How often each token is drawn over many seeds."""
    rows = [row(seed=i, temperature=1.0, **params) for i in range(count)]
    return np.bincount(choose(logits(*values, num_rows=count), rows), minlength=VOCAB) / count


def test_temperature_zero_takes_the_largest_logit():
    assert choose(logits(0.0, 3.0, 1.0), [row()]) == [1]


def test_drawn_shares_follow_the_distribution():
    shares = draws([0.0, np.log(2.0), np.log(5.0)])
    np.testing.assert_allclose(shares[:3], [1 / 8, 2 / 8, 5 / 8], atol=0.03)


def test_a_low_temperature_sharpens_the_distribution():
    rows = [row(seed=i, temperature=0.5) for i in range(4000)]
    shares = np.bincount(choose(logits(0.0, np.log(2.0), num_rows=4000), rows), minlength=2) / 4000
    np.testing.assert_allclose(shares[:2], [1 / 5, 4 / 5], atol=0.03)


def test_top_k_leaves_k_tokens():
    shares = draws([1.0, 2.0, 3.0, 4.0], top_k=2)
    assert shares[2] > 0 and shares[3] > 0 and shares[2] + shares[3] == 1


def test_top_p_leaves_the_smallest_head_that_reaches_p():
    values = list(np.log([0.5, 0.3, 0.15, 0.05]))
    assert draws(values, top_p=0.79)[:2].sum() == 1
    assert draws(values, top_p=0.81)[2] > 0


def test_top_p_counts_within_what_top_k_left():
    values = list(np.log([0.5, 0.3, 0.15, 0.05]))
    assert draws(values, top_k=2, top_p=0.62)[0] == 1


def test_min_p_drops_tokens_far_below_the_most_likely():
    shares = draws(list(np.log([0.5, 0.3, 0.15, 0.05])), min_p=0.4)
    assert shares[:2].sum() == 1 and shares[1] > 0


def test_the_repetition_penalty_covers_prompt_and_output():
    values = [3.0, 2.9, 2.8, -1.0]
    chosen = choose(logits(*values), [row(prompt=(0,), output=(1,), repetition_penalty=2.0)])
    assert chosen == [2]


def test_a_negative_logit_is_pushed_down_by_the_repetition_penalty():
    scores = torch.full((1, 3), -30.0)
    scores[0, :2] = torch.tensor([-1.0, -1.5])
    assert choose(scores, [row(prompt=(0,), repetition_penalty=2.0)]) == [1]


def test_presence_counts_once_and_frequency_each_time_and_only_in_the_output():
    values = [3.0, 2.5, 2.0]
    assert choose(logits(*values), [row(prompt=(0,), presence_penalty=5.0)]) == [0]
    assert choose(logits(*values), [row(output=(0, 0, 0), presence_penalty=0.4)]) == [0]
    assert choose(logits(*values), [row(output=(0, 0, 0), frequency_penalty=0.4)]) == [1]


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(top_k=5),
        dict(top_p=0.9),
        dict(min_p=0.05),
        dict(top_k=7, top_p=0.8, repetition_penalty=1.3),
    ],
    ids=str,
)
def test_a_row_draws_the_same_alone_and_among_others(params):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(40, VOCAB, generator=generator)
    others = [dict(), dict(top_k=3), dict(top_p=0.5), dict(min_p=0.2), dict(top_k=40)]
    rows = [row(seed=i, temperature=0.8, output=[i % 5], **others[i % 5]) for i in range(40)]
    rows[17] = row(seed=99, temperature=0.7, output=[4, 4], **params)
    assert choose(scores.clone(), rows)[17] == choose(scores[17:18].clone(), [rows[17]])[0]


def test_the_next_position_draws_another_number():
    seeds = np.full(1000, 5, dtype=np.uint64)
    numbers = uniform(seeds, np.arange(1000, dtype=np.uint64))
    assert len(set(numbers)) == 1000 and 0 <= numbers.min() and numbers.max() < 1
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0], 100, atol=40)
    assert uniform(seeds[:1], np.array([3], np.uint64))[0] == numbers[3]
