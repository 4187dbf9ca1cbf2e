"""`top_a` cuts off what is less likely than the largest probability squared, times it."""

import numpy as np
import torch

from gristmill.engine.batch.sequence import SAMPLING_DTYPE, SAMPLING_NUMBERS
from gristmill.engine.model.sampler import SamplingRows, sample
from gristmill.jobs.spec import JobSpec, parse_sampling
from gristmill.worker.run.prepare import build_sampling


def draw(text: str) -> set[int]:
    spec = JobSpec(input=["a"], output="b", model="c", sampling=parse_sampling(text))
    params = build_sampling(spec)
    numbers = tuple(getattr(params, name) for name in SAMPLING_NUMBERS)
    rows = np.array([(*numbers, params.kind, seed) for seed in range(2000)], SAMPLING_DTYPE)
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(len(rows), -1).clone()
    return set(sample(logits, SamplingRows(rows, np.zeros(len(rows), np.int64))).tolist())


assert draw("temperature=1") == {0, 1, 2, 3}
assert draw("temperature=1,top_a=1") == {0, 1}
assert draw("temperature=1,top_a=0.5") == {0, 1, 2}
