"""Expected memory and expected output lengths: exact peaks, and predictions that correct themselves."""

from __future__ import annotations

import math
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.engine.batch.admission import (
    ASSUMED_TOKENS,
    MAX_QUANTILE,
    MIN_QUANTILE,
    ExpectedMemory,
    OutputLengths,
)

row = st.tuples(st.integers(1, 9), st.integers(1, 200))  # blocks of its own now, steps to its end


@given(st.lists(row, max_size=12), row, st.integers(0, 20))
def test_the_peak_is_that_of_a_simulation(rows, candidate, shared):
    memory = ExpectedMemory(
        shared + sum(own for own, _ in rows),
        np.array([steps for _, steps in rows], np.int64),
        np.array([own for own, _ in rows], np.int64),
    )
    every = [*rows, candidate]
    ends = sorted({steps for _, steps in every})
    peak = max(shared + sum(own + now / 16 for own, steps in every if steps >= now) for now in ends)
    assert math.isclose(memory.peak_with(*candidate), peak)
    memory.add(*candidate)
    assert math.isclose(
        memory.peak_with(0, 1), max(peak, shared + sum(own for own, _ in every) + (len(every) + 1) / 16)
    )


def test_before_anything_is_known_a_usual_length_is_assumed_and_outgrown():
    lengths = OutputLengths()
    assert lengths.predict(np.array([0, 10, 100])).tolist() == [ASSUMED_TOKENS, ASSUMED_TOKENS, 200]


def test_a_prediction_is_a_quantile_of_the_longer_ones():
    lengths = OutputLengths()
    for size in range(1, 101):
        lengths.note_end(size)
    low, late = lengths.predict(np.array([0, 50]))
    assert 58 <= low <= 66
    assert 78 <= late <= 84
    assert (lengths.predict(np.arange(300)) > np.arange(300)).all()


def test_jobs_learn_from_the_latest_rows():
    lengths = OutputLengths()
    for size in [10] * 2000 + [90] * 1100:
        lengths.note_end(size)
    assert lengths.predict(np.array([0])).tolist() == [90]


def test_preemptions_raise_the_quantile_and_quiet_lowers_it():
    lengths = OutputLengths()
    assert lengths.quantile == MIN_QUANTILE
    for _ in range(3):
        lengths.note_preemption()
    raised = lengths.quantile
    assert MIN_QUANTILE < raised <= MAX_QUANTILE
    rng = random.Random(2)
    for _ in range(2000):
        lengths.note_end(rng.randint(1, 50))
    assert MIN_QUANTILE <= lengths.quantile < MIN_QUANTILE + 0.02
