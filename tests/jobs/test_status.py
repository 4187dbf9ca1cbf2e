"""Who works on a job, as its status says it: processes that hold shards, and those that could take it up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.records import JobRecord, WorkerModel
from gristmill.jobs.stats import JobStats
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    Clock,
    change_job,
    claim_or_fail,
    create_job,
    dead_owner,
    run_all,
)


def submit(store: Store, out: Path, *shard_rows: int) -> JobRecord:
    job = create_job(store, out, *shard_rows)
    change_job(store, job, runner="workers")
    return job


def add_worker(store: Store, owner: Owner, model: str = "null:") -> None:
    offered = [WorkerModel(model, "f" * 32, "float32", False)]
    store.workers.register(f"worker-{owner.host}-{owner.pid}", owner, offered, "1")


def test_a_local_job_is_live_while_its_process_lives(store: Store, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 4, owner=current_owner())
    clock.now += 5000
    assert store.jobs.status(job.job_id).is_live
    change_job(store, job, owner=dead_owner().to_text())
    assert not store.jobs.status(job.job_id).is_live
    change_job(store, job, owner=None)
    assert not store.jobs.status(job.job_id).is_live


def test_a_job_of_another_host_is_live_until_its_lease_is_over(store: Store, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 4, owner=ELSEWHERE)
    clock.now += 59
    assert store.jobs.status(job.job_id).is_live
    clock.now += 2
    assert not store.jobs.status(job.job_id).is_live


def test_a_submitted_job_is_live_while_a_shard_has_a_lease(store: Store, clock: Clock, out: Path) -> None:
    job = submit(store, out, 4, 4)
    assert not store.jobs.status(job.job_id).is_live
    claim_or_fail(store, job)
    assert store.jobs.status(job.job_id).is_live
    clock.now += 61
    assert not store.jobs.status(job.job_id).is_live


def test_a_submitted_job_is_live_while_a_worker_offers_its_model(
    store: Store, clock: Clock, out: Path
) -> None:
    job = submit(store, out, 4)
    add_worker(store, ELSEWHERE, model="another")
    add_worker(store, replace(ELSEWHERE, pid=8))
    store.workers.stop("worker-elsewhere-8")
    add_worker(store, dead_owner())
    assert not store.jobs.status(job.job_id).is_live
    add_worker(store, OTHER_PLACE)
    assert store.jobs.status(job.job_id).is_live
    clock.now += 61
    assert not store.jobs.status(job.job_id).is_live


def test_a_job_that_ended_is_not_live(store: Store, out: Path) -> None:
    job = submit(store, out, 4)
    add_worker(store, ELSEWHERE)
    change_job(store, job, state="expired")
    assert not store.jobs.status(job.job_id).is_live


def test_the_processes_that_hold_shards_are_counted_once_each(store: Store, out: Path) -> None:
    job = submit(store, out, 1, 1, 1, 1)
    assert store.jobs.status(job.job_id).num_workers == 0
    for owner in (ELSEWHERE, ELSEWHERE, OTHER_PLACE):
        claim_or_fail(store, job, owner)
    assert store.jobs.status(job.job_id).num_workers == 2


def test_the_status_repeats_what_was_asked_for(store: Store, out: Path) -> None:
    job = submit(store, out, 4)
    asked = {"idempotency_key": "night-7", "not_before": 5.0, "deadline_at": 9.0}
    change_job(store, job, priority=2, **asked)
    status = store.jobs.status(job.job_id)
    assert (status.runner, status.priority) == ("workers", "low")
    assert {name: getattr(status, name) for name in asked} == asked


def test_a_submitted_job_has_no_rate_before_a_worker_works(store: Store, clock: Clock, out: Path) -> None:
    job = submit(store, out, 4)
    change_job(store, job, started_at=clock.now)
    clock.now += 3600
    status = store.jobs.status(job.job_id)
    assert (status.elapsed_s, status.rows_per_s, status.eta_s) == (0, None, None)


def test_the_learned_speed_of_submitted_jobs_is_that_of_one_engine(
    store: Store, storage: Storage, out: Path
) -> None:
    """Eight workers finish a job in an eighth of the time; a shard is still run by one of them."""
    job = submit(store, out, 100)
    run_all(store, storage, job)
    change_job(store, job, active_s=10.0, stats=JobStats(busy_s=80.0).to_json())
    assert store.jobs.learned_rows_per_s(job.fingerprint, None) == 1.25
