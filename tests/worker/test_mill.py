"""A pool over a real database and real engine processes: submitted jobs run, share a worker, stop and go on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan.planner import plan_submitted_job
from gristmill.jobs.records import JobRecord
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.states import JobState
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.serve.catalog import load_catalog
from gristmill.worker.serve.model_host import HostOptions
from gristmill.worker.serve.model_pool import ModelPool
from tests.worker.queue_kit import eventually

LIMIT_S = 40.0
LEASE_S = 4.0


class Yard:
    """Submitted jobs below one temporary folder, and the mills that run them."""

    def __init__(self, kit: Any, store: Store) -> None:
        self.kit = kit
        self.store = store
        self.pools: list[ModelPool] = []
        self._num_jobs = 0

    def submit(
        self, num_rows: int, model: str = "null", texts: dict[int, str] | None = None, **fields: Any
    ) -> JobRecord:
        """A planned job of so many rows."""
        self._num_jobs += 1
        rows = [{"text": (texts or {}).get(i, f"row {i}")} for i in range(num_rows)]
        source = self.kit.write_jsonl(rows, f"in{self._num_jobs}.jsonl")
        spec = {
            "input": [str(source)],
            "output": str(self.kit.folder / f"out{self._num_jobs}"),
            "model": model,
            "prompt": "{{ text }}",
            "max_tokens": 8,
            "shard_rows": 50,
            **fields,
        }
        job = self.store.submissions.submit(parse_spec(spec)).job
        plan_submitted_job(self.store, job.job_id, current_owner(), [str(self.kit.folder)])
        return self.store.jobs.load(job.job_id)

    def start_pool(self, *models: str, max_models: int = 1) -> ModelPool:
        pool = ModelPool(
            self.store,
            load_catalog(models or ["null=null:?delay_ms=1"]),
            HostOptions([str(self.kit.folder)], EngineOptions(), LEASE_S, engine_timeout_s=5.0),
            max_models=max_models,
            notify=lambda task, args, queue: True,
        )
        pool.start()
        self.pools.append(pool)
        return pool

    def wait(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        assert eventually(condition, limit_s), [job.state for job in self.store.jobs.newest()]

    def wait_state(self, job: JobRecord, state: JobState) -> Any:
        self.wait(lambda: self.store.jobs.load(job.job_id).state == state)
        return self.store.jobs.status(job.job_id)

    def row_indexes(self, job: JobRecord) -> list[int]:
        return [row["row_index"] for row in self.kit.rows(Path(job.output))]


@pytest.fixture
def yard(kit: Any, tmp_path: Path) -> Iterator[Yard]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db", lease_s=LEASE_S) as store:
        yard = Yard(kit, store)
        yield yard
        for pool in yard.pools:
            pool.stop()


def test_a_submitted_job_is_run_to_its_manifest(yard: Yard) -> None:
    job = yard.submit(230)
    yard.start_pool()
    status = yard.wait_state(job, JobState.COMPLETED)
    assert (status.completed, status.failed, status.not_run) == (230, 0, 0)
    assert yard.row_indexes(job) == list(range(230))
    assert (Path(job.output) / "_manifest.json").exists()
    assert yard.store.jobs.load(job.job_id).fingerprint != ""


def test_a_small_job_of_high_priority_overtakes_a_large_one(yard: Yard) -> None:
    large = yard.submit(3000)
    pool = yard.start_pool()
    yard.wait(lambda: yard.store.jobs.status(large.job_id).rows_done > 0)
    small = yard.submit(60, priority="high")
    pool.wake("null")
    yard.wait_state(small, JobState.COMPLETED)
    assert yard.store.jobs.status(large.job_id).not_run > 1000
    yard.wait_state(large, JobState.COMPLETED)


def test_a_cancelled_job_leaves_the_engine_within_five_seconds_and_the_other_goes_on(yard: Yard) -> None:
    doomed, other = yard.submit(20_000), yard.submit(20_000)
    pool = yard.start_pool()
    for job in (doomed, other):
        yard.wait(lambda job=job: yard.store.jobs.status(job.job_id).rows_done > 0)  # type: ignore[misc]
    yard.store.ends.request_cancel(doomed.job_id)
    started_s = time.monotonic()
    status = yard.wait_state(doomed, JobState.CANCELLED)
    assert time.monotonic() - started_s < 5.0
    assert status.completed + status.not_run == 20_000
    assert len(yard.row_indexes(doomed)) == status.completed > 0
    yard.store.ends.request_cancel(other.job_id)
    yard.wait_state(other, JobState.CANCELLED)
    yard.wait(lambda: pool.figures().num_rows_in_flight == 0)


def test_a_cancelled_job_is_resumed_without_computing_a_committed_row_again(yard: Yard) -> None:
    job = yard.submit(1500)
    pool = yard.start_pool()
    yard.wait(lambda: yard.store.jobs.status(job.job_id).completed >= 200)
    yard.store.ends.request_cancel(job.job_id)
    kept = yard.wait_state(job, JobState.CANCELLED).completed
    assert yard.store.ends.resume(job.job_id) == JobState.IN_PROGRESS
    assert yard.store.ends.resume(job.job_id) == JobState.IN_PROGRESS
    pool.wake()
    status = yard.wait_state(job, JobState.COMPLETED)
    assert status.completed == 1500
    assert yard.row_indexes(job) == list(range(1500))
    assert kept >= 200
    assert yard.store.ends.resume(job.job_id) == JobState.COMPLETED


def test_a_stop_gives_the_shards_back_with_their_finished_rows(yard: Yard) -> None:
    job = yard.submit(5000, shard_rows=2500)
    pool = yard.start_pool()
    yard.wait(
        lambda: yard.store.jobs.status(job.job_id).rows_done >= 300 or pool.figures().num_rows_in_flight > 0
    )
    yard.wait(lambda: pool.figures().num_shards > 0)
    threading.Event().wait(1.0)
    started_s = time.monotonic()
    assert pool.stop(10.0)
    assert time.monotonic() - started_s < 10.0
    status = yard.store.jobs.status(job.job_id)
    assert set(status.shards) <= {"queued", "done"}
    assert len(yard.row_indexes(job)) == status.completed > 0
    yard.start_pool()
    yard.wait_state(job, JobState.COMPLETED)
    assert yard.row_indexes(job) == list(range(5000))


def test_a_worker_with_other_weights_of_that_name_does_not_touch_a_pinned_job(yard: Yard) -> None:
    job = yard.submit(2000)
    pool = yard.start_pool()
    yard.wait(lambda: yard.store.jobs.status(job.job_id).completed > 0)
    assert pool.stop()
    done = yard.store.jobs.status(job.job_id).completed
    other = yard.start_pool("null=null:?delay_ms=2")
    other.run_once(time.monotonic())
    assert other.figures().num_shards == 0
    yard.start_pool()
    assert yard.wait_state(job, JobState.COMPLETED).completed == 2000 > done


def test_a_row_that_kills_the_engine_is_quarantined_and_every_other_row_completes(yard: Yard) -> None:
    job = yard.submit(200, texts={77: "poison"})
    yard.start_pool("null=null:?crash_on=poison")
    status = yard.wait_state(job, JobState.COMPLETED)
    assert status.errors_by_code == {"poisoned": 1}
    assert yard.row_indexes(job) == list(range(200))


def test_failed_rows_are_computed_again_on_request_and_the_others_stay(yard: Yard) -> None:
    job = yard.submit(300)
    pool = yard.start_pool("null=null:?failure_rate=0.2")
    failed = yard.wait_state(job, JobState.COMPLETED).failed
    assert failed > 20
    before = {
        row["row_index"]: row["completion"] for row in yard.kit.rows(Path(job.output)) if row["completion"]
    }
    assert yard.store.ends.retry_failed(job.job_id) == failed
    pool.wake()
    yard.wait(lambda: yard.store.jobs.load(job.job_id).state in (JobState.COMPLETED, JobState.FAILED))
    after = {row["row_index"]: row["completion"] for row in yard.kit.rows(Path(job.output))}
    assert sorted(after) == list(range(300))
    assert all(after[row] == text for row, text in before.items())
    assert yard.store.jobs.status(job.job_id).failed == failed  # this model fails the same rows each time


def test_too_many_failed_rows_stop_the_job_and_keep_what_is_done(yard: Yard) -> None:
    job = yard.submit(5000, max_errors=20)
    yard.start_pool("null=null:?failure_rate=0.5&delay_ms=1")
    status = yard.wait_state(job, JobState.FAILED)
    assert "20" in (status.message or "")
    assert status.failed > 20
    assert status.not_run > 0
    assert len(yard.row_indexes(job)) == status.completed + status.failed


def test_models_take_turns_where_only_one_fits(yard: Yard) -> None:
    first, second = yard.submit(100, model="a"), yard.submit(100, model="b")
    yard.start_pool("a=null:", "b=null:", max_models=1)
    yard.wait_state(first, JobState.COMPLETED)
    yard.wait_state(second, JobState.COMPLETED)


def test_a_worker_whose_engine_can_not_start_ends_and_blames_no_row(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = yard.submit(100)
    monkeypatch.setattr("gristmill.worker.engine.child.sys.executable", "/bin/false")
    pool = yard.start_pool()
    yard.wait(lambda: pool.failure is not None)
    status = yard.store.jobs.status(job.job_id)
    assert (status.failed, status.not_run) == (0, 100)


def test_a_run_takes_and_gives_no_shard_of_another_job(yard: Yard, tmp_path: Path, repo_root: Path) -> None:
    submitted = yard.submit(600)
    source = yard.kit.write_jsonl([{"text": f"row {i}"} for i in range(600)], "local.jsonl")
    url = f"sqlite:///{tmp_path}/jobs.db"
    words = f"run {source} --model null:?delay_ms=1 --prompt a --max-tokens 8 --shard-rows 50 --database-url {url}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "gristmill", *words.split(), "--output", str(tmp_path / name)],
            cwd=repo_root,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in ("run1", "run2")
    ]
    yard.start_pool()
    assert [run.wait(timeout=LIMIT_S) for run in runs] == [0, 0]
    yard.wait_state(submitted, JobState.COMPLETED)
    with sqlite3.connect(tmp_path / "jobs.db") as connection:
        query = "SELECT output, attempts.owner FROM attempts JOIN shards ON shards.id = shard_id JOIN jobs"
        found = set(connection.execute(f"{query} ON jobs.id = job_id"))
    pids = {str(tmp_path / name): run.pid for name, run in zip(("run1", "run2"), runs, strict=True)}
    pids[submitted.output] = os.getpid()
    assert {output: int(owner.partition(":")[0]) for output, owner in found} == pids
    assert len(found) == 3
