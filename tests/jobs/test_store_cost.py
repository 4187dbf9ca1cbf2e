"""What a claim costs beside the work that it brings: a shard is about 30 seconds of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from gristmill.jobs.plan.cutting import TARGET_SHARD_S
from gristmill.jobs.store.store import Store
from tests.jobs.cases import ELSEWHERE, OFFER, submit_job

NUM_CLAIMS = 200


@pytest.mark.parametrize(
    ("num_shards", "num_jobs"), [(2_000, 10), pytest.param(100_000, 50, marks=pytest.mark.long)]
)
def test_a_claim_costs_less_than_a_hundredth_of_a_shard(
    store: Store, tmp_path: Path, num_shards: int, num_jobs: int
) -> None:
    submit_job(store, tmp_path / "large", *([1] * num_shards))
    for i in range(num_jobs - 1):
        submit_job(store, tmp_path / f"small{i}", *([1] * 10))
    seconds = []
    for _ in range(NUM_CLAIMS):
        begun = time.perf_counter()
        assert store.claims.next(OFFER, ELSEWHERE) is not None
        seconds.append(time.perf_counter() - begun)
    median, p95 = np.quantile(seconds, [0.5, 0.95])
    print(
        f"claim among {num_shards:,} shards and {num_jobs} jobs: {median * 1000:.1f} ms (median),"
        f" {p95 * 1000:.1f} ms (95%): {p95 / TARGET_SHARD_S:.2%} of a shard"
    )
    assert p95 < 0.01 * TARGET_SHARD_S
