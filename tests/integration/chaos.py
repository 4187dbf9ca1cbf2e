"""What the chaos tests share: where they run, the calm run that every other one must equal, and who holds what."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.cluster import TERMINAL, Cluster
from tests.integration.row_check import comparable
from tests.integration.worker_process import WorkerProcess

SHORT = pytest.mark.parametrize("cluster", [("sqlite", "local")], indirect=True, ids="-".join)
LONG = pytest.mark.parametrize("cluster", [("postgres", "s3")], indirect=True, ids="-".join)
LEASE_S = 3.0
RECOVERY_S = LEASE_S + 10.0  # the most that it may take until work goes on elsewhere


def run_calmly(cluster: Cluster) -> list[tuple[Any, ...]]:
    """What the rows of in.jsonl give when nothing happens."""
    worker = cluster.start_worker({"calm": "null:"})
    job_id = cluster.submit("in.jsonl", "calm", model="calm")
    cluster.wait_done(job_id)
    assert worker.stop() == 0
    return comparable(cluster.place("calm"), cluster.s3)


def is_over(cluster: Cluster, job_id: str, within_s: float) -> bool:
    """Whether the job ends within that time."""
    deadline = time.monotonic() + within_s
    while cluster.job(job_id)["state"] not in TERMINAL:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def load_claims(cluster: Cluster, worker: WorkerProcess) -> list[tuple[int, int]]:
    """The claims that the worker has, as the database knows: (shard's id, fence)."""
    query = "SELECT id, fence FROM shards WHERE state = 'running' AND owner LIKE :owner"
    return [(row["id"], row["fence"]) for row in cluster.query(query, owner=f"{worker.pid}:%")]


def takeover_times(cluster: Cluster, job_id: str, claims: list[tuple[int, int]], since: float) -> list[float]:
    """For each claim that was lost: how long after `since` (a time) the shard was claimed again."""
    attempts = cluster.attempts(job_id)
    started = {(row["shard_id"], row["fence"]): row["started_at"] for row in attempts}
    lost = {(row["shard_id"], row["fence"]) for row in attempts if row["outcome"] == "lost"}
    return [started[shard, fence + 1] - since for shard, fence in claims if (shard, fence) in lost]


def count_stale_commits(cluster: Cluster, job_id: str) -> int:
    """Of a completed job: commits beyond the one of each shard, and rows beyond those that there are."""
    shards, attempts = cluster.shards(job_id), cluster.attempts(job_id)
    num_ends = sum(attempt["outcome"] == "done" for attempt in attempts)
    num_rows = sum(attempt["rows_committed"] for attempt in attempts)
    return (num_ends - len(shards)) + (num_rows - sum(shard["num_rows"] for shard in shards))


def count_losses(cluster: Cluster, job_id: str) -> int:
    """How often a worker found that a shard was not its own any more."""
    return len(cluster.query("SELECT id FROM events WHERE job_id = :id AND kind = 'shard_lost'", id=job_id))
