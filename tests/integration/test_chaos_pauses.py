"""Workers that stop for longer than their lease and go on as if nothing had happened: figure 3 of RELIABILITY.md."""

from __future__ import annotations

import random
import time
from itertools import count

import psutil
import pytest

from tests.integration.chaos import (
    LEASE_S,
    LONG,
    RECOVERY_S,
    count_losses,
    count_stale_commits,
    is_over,
    load_claims,
    run_calmly,
    takeover_times,
)
from tests.integration.cluster import Cluster
from tests.integration.devices import Devices
from tests.integration.row_check import comparable, read_files
from tests.integration.worker_process import WorkerProcess, wait_until

MODEL = {"null": "null:?delay_ms=15"}
POINTS = ("commit.before!stop", "publish.before!stop")


def start_pair(cluster: Cluster, crash_at: str) -> tuple[WorkerProcess, WorkerProcess]:
    """A worker that will stop, and another one that is not up yet."""
    devices = Devices(cluster.folder)
    zombie = cluster.start_worker(MODEL, env=devices.environment(), crash_at=crash_at)
    return zombie, cluster.start_worker(MODEL, env=devices.environment(), is_awaited=False)


def wait_stopped(cluster: Cluster, worker: WorkerProcess) -> None:
    process = psutil.Process(worker.pid)
    is_stopped = lambda: process.status() == psutil.STATUS_STOPPED  # noqa: E731
    wait_until(is_stopped, 60.0, "the worker stops itself", cluster.describe)


def check_zombie(cluster: Cluster, crash_at: str, num_rows: int, shard_rows: int) -> None:
    """A worker stops on its way to a commit, another one finishes the job, and then the first one goes on."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    calm = run_calmly(cluster)
    zombie, other = start_pair(cluster, crash_at)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    wait_stopped(cluster, zombie)
    held = load_claims(cluster, zombie)
    assert held, "it has nothing that it could lose"
    other.wait_until_up()
    since = time.time()  # it is stopped, and there is somebody to take over
    cluster.assert_whole(job_id, expected)
    finished = read_files(cluster.place("out"), cluster.s3), cluster.attempts(job_id)
    zombie.unpause()
    is_told = lambda: count_losses(cluster, job_id) >= len(held)  # noqa: E731
    wait_until(is_told, 20.0, "the worker finds that its shards are another's", cluster.describe)
    assert other.stop() == 0
    rows = cluster.write_rows("next.jsonl", 20)
    next_id = cluster.submit("next.jsonl", "next", shard_rows=10)  # which only the first worker can run
    cluster.assert_whole(next_id, rows)
    assert finished == (read_files(cluster.place("out"), cluster.s3), cluster.attempts(job_id))
    assert comparable(cluster.place("out"), cluster.s3) == calm
    took, stale = takeover_times(cluster, job_id, held, since), count_stale_commits(cluster, job_id)
    print(
        f"figure 3: SIGSTOP at {crash_at} with {len(held)} claims, SIGCONT after the job: stale commits accepted"
        f" {stale}; another one had the shards after {max(took):.1f} s (limit {RECOVERY_S:g} s)"
    )
    assert stale == 0
    assert len(took) == len(held) and max(took) <= RECOVERY_S


def check_pauses(
    cluster: Cluster, *, num_rows: int, shard_rows: int, num_pauses: int, num_workers: int
) -> None:
    """Again and again a worker stops, alone or with its engine, for longer than its lease."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    calm = run_calmly(cluster)
    devices, chance = Devices(cluster.folder), random.Random(3)
    workers = [
        cluster.start_worker(MODEL, env=devices.environment(), is_awaited=False) for _ in range(num_workers)
    ]
    for worker in workers:
        worker.wait_until_up()
    num_paused = num_losses = num_claims = stale = 0
    took: list[float] = []
    for round_index in count():
        job_id = cluster.submit("in.jsonl", f"out-{round_index}", shard_rows=shard_rows)
        cluster.wait_started(job_id)
        pauses = []
        while num_paused < num_pauses and not is_over(cluster, job_id, chance.uniform(0.2, 1.5)):
            worker = chance.choice(workers)
            at = time.time()
            worker.pause(with_engines=chance.random() < 0.5)
            pauses.append((at, load_claims(cluster, worker)))
            is_over(cluster, job_id, LEASE_S + chance.uniform(0.3, 3.0))
            worker.unpause()
            num_paused += 1
        cluster.assert_whole(job_id, expected)
        assert comparable(cluster.place(f"out-{round_index}"), cluster.s3) == calm
        for at, held in pauses:
            took += takeover_times(cluster, job_id, held, at)
            num_claims += len(held)
        num_losses += count_losses(cluster, job_id)
        stale += count_stale_commits(cluster, job_id)
        if num_paused == num_pauses:
            break
    print(
        f"figure 3: {num_paused} pauses in {round_index + 1} jobs of {num_rows} rows: stale commits accepted {stale};"
        f" {num_claims} claims paused, {len(took)} taken over after {max(took):.1f} s at most (limit"
        f" {RECOVERY_S:g} s), {num_losses} given up by the paused workers; lost 0, doubled 0"
    )
    assert stale == 0
    assert num_losses > 0, "no pause cost a worker a shard: they are too short"
    assert max(took) <= RECOVERY_S
    assert len(cluster.running_workers()) == num_workers


# Not SQLite: a process that sleeps inside a transaction holds the whole file, and no server ends its session.
@pytest.mark.parametrize("cluster", [("postgres", "local")], indirect=True, ids="-".join)
@pytest.mark.parametrize("crash_at", [pytest.param(POINTS[0], marks=pytest.mark.long), POINTS[1]])
def test_a_worker_that_slept_before_its_commit_changes_nothing(cluster: Cluster, crash_at: str) -> None:
    check_zombie(cluster, crash_at, num_rows=100, shard_rows=20)


@LONG
@pytest.mark.parametrize("crash_at", [point.replace("!", ":3!") for point in POINTS])
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_that_slept_in_a_large_job_changes_nothing(cluster: Cluster, crash_at: str) -> None:
    check_zombie(cluster, crash_at, num_rows=5000, shard_rows=50)


@LONG
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_workers_that_sleep_beyond_their_lease_commit_nothing_stale(cluster: Cluster) -> None:
    check_pauses(cluster, num_rows=5000, shard_rows=50, num_pauses=30, num_workers=3)
