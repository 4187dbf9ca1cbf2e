"""Many jobs on several workers: nobody idles while rows wait, small jobs are quick, two are nearly twice one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.integration.chaos import LONG, SHORT
from tests.integration.cluster import Cluster
from tests.integration.row_check import RowId
from tests.integration.worker_process import WorkerProcess

SIZES = (300, 240, 200, 180, 160, 150, 140, 130, 120)  # of the ordinary jobs, in rows
SMALL = 20  # of the urgent one
MAX_IDLE_S = 3.0  # a worker looks at the database every two seconds at the latest


class IdleWatch:
    """How long any worker had nothing at a time when a shard waited in the queue."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since: dict[int, float] = {}
        self.longest_s = 0.0
        self.num_busy: dict[int, int] = {worker.pid: 0 for worker in cluster.workers}

    def look(self) -> None:
        shards = self._cluster.query("SELECT state, owner FROM shards WHERE state IN ('queued', 'running')")
        waiting = any(shard["state"] == "queued" for shard in shards)
        busy = {int(shard["owner"].split(":")[0]) for shard in shards if shard["owner"]}
        now = time.monotonic()
        for pid in self.num_busy:
            if pid in busy or not waiting:
                self._since.pop(pid, None)
                self.num_busy[pid] += pid in busy
            else:
                self.longest_s = max(self.longest_s, now - self._since.setdefault(pid, now))


def wait_all(
    cluster: Cluster, num_jobs: int, timeout_s: float, look: Callable[[], None]
) -> list[dict[str, Any]]:
    """The jobs once all are completed, looked at about five times a second until then."""
    deadline = time.monotonic() + timeout_s
    while True:
        look()
        jobs = cluster.query("SELECT * FROM jobs ORDER BY finished_at")
        states = [job["state"] for job in jobs]
        if states.count("completed") == num_jobs:
            return jobs
        assert "failed" not in states and time.monotonic() < deadline, cluster.describe()
        time.sleep(0.2)


def run_ten_jobs(cluster: Cluster, factor: int, delay_ms: float) -> None:
    """Nine jobs of mixed size and a small urgent one, all at once, on two workers."""
    model = {"null": f"null:?delay_ms={delay_ms:g}"}
    expected: dict[str, list[RowId]] = {}
    cluster.start_workers(2, model)
    for i, num_rows in enumerate((*SIZES, SMALL)):
        rows = cluster.write_rows(f"in{i}.jsonl", num_rows * (factor if num_rows != SMALL else 1))
        priority = "high" if num_rows == SMALL else "normal"
        job_id = cluster.submit(f"in{i}.jsonl", f"out{i}", shard_rows=20 * factor, priority=priority)
        expected[job_id] = rows
    watch = IdleWatch(cluster)
    jobs = wait_all(cluster, len(expected), 240.0, watch.look)
    # What the two engines held when it came may end before it, and nothing else.
    assert SMALL in [job["num_rows"] for job in jobs[:3]], [
        (job["num_rows"], job["finished_at"]) for job in jobs
    ]
    for job_id, rows in expected.items():
        cluster.assert_whole(job_id, rows)
    print(
        f"longest idle time of a worker while shards waited: {watch.longest_s:.1f} s; busy {watch.num_busy}"
    )
    assert watch.longest_s <= MAX_IDLE_S
    assert all(watch.num_busy.values()), watch.num_busy


@SHORT
def test_ten_jobs_of_mixed_size_share_two_workers(cluster: Cluster) -> None:
    run_ten_jobs(cluster, factor=1, delay_ms=4)


@pytest.mark.long
@pytest.mark.timeout(600)
@LONG
def test_ten_larger_jobs_share_two_workers_over_real_services(cluster: Cluster) -> None:
    run_ten_jobs(cluster, factor=5, delay_ms=4)


def cpu_s(worker: WorkerProcess) -> float:
    """Processor time of a worker and its engine so far."""
    processes = [psutil.Process(worker.pid), *worker.engines()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_s(cluster: Cluster, num_workers: int, num_rows: int) -> float:
    """Seconds from the first claim to the end of a job on so many fresh workers."""
    model = {"null": "null:?delay_ms=5"}
    workers = cluster.start_workers(num_workers, model)
    rows = cluster.write_rows(f"in{num_workers}.jsonl", num_rows)
    job_id = cluster.submit(f"in{num_workers}.jsonl", f"out{num_workers}", shard_rows=100)
    cluster.wait_started(job_id)
    started_s, used_s = time.monotonic(), sum(map(cpu_s, workers))
    job = cluster.wait_done(job_id, timeout_s=num_rows * 0.005 * 3 + 60)
    cores = (sum(map(cpu_s, workers)) - used_s) / (time.monotonic() - started_s) / num_workers
    print(f"{num_workers} workers: {cores:.2f} of a core each")
    assert cores < 0.25
    cluster.assert_whole(job_id, rows)
    for worker in workers:
        assert worker.stop() == 0
    return float(job["finished_at"] - job["started_at"])


@pytest.mark.long
@pytest.mark.timeout(600)
@LONG
def test_two_workers_are_at_least_1_8_times_as_fast_as_one(cluster: Cluster) -> None:
    num_rows = 12_000
    one_s, two_s = measure_s(cluster, 1, num_rows), measure_s(cluster, 2, num_rows)
    print(f"{num_rows} rows of 5 ms: one worker {one_s:.1f} s, two {two_s:.1f} s, ratio {one_s / two_s:.2f}")
    assert one_s >= num_rows * 0.005  # the engine's own delay: it is one worker that is measured
    assert one_s / two_s >= 1.8
