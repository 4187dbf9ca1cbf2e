"""kill -9 of workers and of engine processes at random times: figures 1 and 16 of RELIABILITY.md.

Every worker is on a machine of its own, so a dead one's shards come back only when their leases are over.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import count

import psutil
import pytest

from gristmill.worker.engine.credit_window import NULL_WINDOW_S
from tests.integration.chaos import LONG, RECOVERY_S, SHORT, is_over, load_claims, run_calmly, takeover_times
from tests.integration.cluster import Cluster
from tests.integration.devices import Devices, RowRun, count_redone, first_run
from tests.integration.row_check import comparable
from tests.integration.worker_process import UP, WorkerProcess, wait_until

DELAY_MS = 15
MODEL = {"null": f"null:?delay_ms={DELAY_MS}"}
WINDOW_ROWS = int(NULL_WINDOW_S * 1000 / DELAY_MS)

Victim = tuple[WorkerProcess, psutil.Process | None]


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill -9, and the claims that the victim's worker held then: (shard's id, fence)."""

    at: float
    is_worker: bool
    host: str
    engine_pid: int | None
    held: list[tuple[int, int]]


class Killer:
    """Keeps a number of workers running, whatever it does to them."""

    def __init__(self, cluster: Cluster, num_workers: int, seed: int) -> None:
        self.cluster = cluster
        self.devices = Devices(cluster.folder)
        self.chance = random.Random(seed)
        self._hosts: dict[int, str] = {}
        for _ in range(num_workers):
            self._start()
        for worker in cluster.workers:
            worker.wait_until_up()

    def kill(self, is_worker: bool, job_id: str) -> Kill | None:
        """Kills a worker, and starts another; or only a worker's engine. None when the job is over before.

        A worker dies when the others are up: else nobody is there to take its shards over.
        """
        victims: list[Victim] = []
        wait_until(
            lambda: victims.extend(self._find(is_worker)) or victims or is_over(self.cluster, job_id, 0.0),
            60.0,
            "there is something to kill",
            self.cluster.describe,
        )
        if not victims:
            return None  # and no engine is needed any more
        worker, engine = self.chance.choice(victims)
        at = time.time()
        if is_worker:
            worker.kill()
        else:
            assert engine is not None
            engine.kill()
        held = load_claims(self.cluster, worker)
        if is_worker:
            self._start()
        return Kill(at, is_worker, self._hosts[worker.pid], engine.pid if engine else None, held)

    def _find(self, is_worker: bool) -> list[Victim]:
        """Workers that may be killed, or those whose engine may be."""
        running = self.cluster.running_workers()
        workers = [worker for worker in running if UP in worker.log_text()]
        if is_worker and len(workers) < len(running):
            return []
        pairs = [(worker, next(iter(worker.engines()), None)) for worker in workers]
        return [(worker, engine) for worker, engine in pairs if engine or is_worker]

    def _start(self) -> None:
        environment = self.devices.environment()
        worker = self.cluster.start_worker(MODEL, env=environment, is_awaited=False)
        self._hosts[worker.pid] = environment["TEST_HOST"]


def recoveries(cluster: Cluster, job_id: str, kills: list[Kill], runs: list[RowRun]) -> list[float]:
    """How long it took after each kill until others had the worker's shards, or the worker computed again."""
    took, redone = [], count_redone(runs)
    for kill in kills:
        if kill.is_worker:
            took += takeover_times(cluster, job_id, kill.held, kill.at)
        elif kill.engine_pid in redone and (run := first_run(runs, kill.host, kill.at)) is not None:
            took.append(run.at - kill.at)
    return took


def check_kills(
    cluster: Cluster, *, num_rows: int, shard_rows: int, num_kills: int, num_workers: int, pause_s: float
) -> None:
    """Job after job until so many kills have come; each job's output is that of a calm run."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    calm = run_calmly(cluster)
    killer = Killer(cluster, num_workers, seed=1)
    all_kills: list[Kill] = []
    took: list[float] = []
    redone: dict[int, int] = {}
    for round_index in count():
        since, kills = killer.devices.log_size, []
        job_id = cluster.submit("in.jsonl", f"out-{round_index}", shard_rows=shard_rows)
        while len(all_kills) + len(kills) < num_kills:
            if is_over(cluster, job_id, killer.chance.uniform(0.0, 2 * pause_s)):
                break
            kill = killer.kill((len(all_kills) + len(kills)) % 2 == 0, job_id)
            if kill is None:
                break
            kills.append(kill)
        cluster.assert_whole(job_id, expected)
        assert comparable(cluster.place(f"out-{round_index}"), cluster.s3) == calm
        runs = killer.devices.runs(since)
        redone.update(count_redone(runs))
        took += recoveries(cluster, job_id, kills, runs)
        all_kills += kills
        if len(all_kills) == num_kills:
            break
    assert len(cluster.running_workers()) == num_workers, f"a worker ended by itself\n{cluster.logs()}"
    print(
        f"figure 1: {num_kills} kills in {round_index + 1} jobs of {num_rows} rows; lost 0, doubled 0;"
        f" rows redone per kill: {max(redone.values(), default=0)} at most,"
        f" {sum(redone.values()) / num_kills:.1f} on average (limit {shard_rows} + {WINDOW_ROWS});"
        f" recovery: {max(took, default=0.0):.1f} s at most of {len(took)} (limit {RECOVERY_S:g} s)"
    )
    assert set(redone) <= {kill.engine_pid for kill in all_kills}, "an engine that nobody killed lost rows"
    assert max(redone.values(), default=0) <= shard_rows + WINDOW_ROWS
    assert max(took, default=0.0) <= RECOVERY_S


@SHORT
def test_three_kills_lose_and_double_nothing(cluster: Cluster) -> None:
    check_kills(cluster, num_rows=500, shard_rows=20, num_kills=3, num_workers=2, pause_s=0.5)


@LONG
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_hundred_kills_lose_and_double_nothing(cluster: Cluster) -> None:
    check_kills(cluster, num_rows=5000, shard_rows=50, num_kills=100, num_workers=3, pause_s=1.0)
