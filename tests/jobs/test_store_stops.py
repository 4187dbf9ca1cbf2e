"""Jobs of the queue that are stopped: by a person, by their deadline, by too many errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import Signal
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    Clock,
    claim_next,
    commit_rows,
    create_job,
    dead_owner,
    finish_shard,
    submit_job,
)


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED])
def test_a_stopped_job_ends_when_its_workers_have_stopped(
    store: Store, storage: Storage, clock: Clock, out: Path, state: JobState
) -> None:
    job = submit_job(store, out, 4, 4)
    claim = claim_next(store)
    assert store.stop_job(job.job_id, state, "because")
    assert not store.stop_job(job.job_id, JobState.CANCELLED), "the first stop counts"
    assert store.load_job(job.job_id).stopping_as == state
    assert store.claim_next(OFFER, ELSEWHERE) is None
    assert store.heartbeat([claim], {}).signal_by_job == {job.job_id: Signal.CANCEL}
    assert store.drain_stopped() == []
    assert store.status(job.job_id).shards == {"cancelled": 1, "running": 1}
    assert commit_rows(store, storage, claim, 0, 1, requeue=True)
    clock.now += 2
    assert store.drain_stopped() == [job.job_id]
    ended = store.load_job(job.job_id)
    assert (ended.state, ended.message, ended.finished_at) == (state, "because", clock.now)
    assert ended.stopping_as is None
    status = store.status(job.job_id)
    assert (status.completed, status.not_run, status.shards) == (2, 6, {"cancelled": 2})
    assert store.drain_stopped() == []


def test_a_stop_does_not_wait_for_the_dead(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    claim_next(store, dead_owner())
    claim_next(store, ELSEWHERE)
    store.request_cancel(job.job_id)
    assert store.drain_stopped() == []
    clock.now += 61
    assert store.drain_stopped() == [job.job_id]


def test_a_shard_that_is_done_after_the_stop_counts(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4)
    claim = claim_next(store)
    store.request_cancel(job.job_id)
    finish_shard(store, storage, claim)
    assert store.drain_stopped() == [job.job_id]
    assert (store.status(job.job_id).state, store.status(job.job_id).completed) == ("cancelled", 4)
    assert store.resume_job(job.job_id) == JobState.IN_PROGRESS
    assert store.jobs_to_finalize() == [job.job_id]


def test_the_reconciler_leaves_the_stops_of_local_runs_to_them(store: Store, out: Path) -> None:
    job = create_job(store, out, 4, owner=current_owner())
    store.request_cancel(job.job_id)
    assert store.drain_stopped() == []
    assert store.finish_cancel(job.job_id)


def test_a_job_expires_at_its_deadline_and_keeps_its_rows(
    store: Store, storage: Storage, clock: Clock, tmp_path: Path, out: Path
) -> None:
    job = submit_job(store, out, 4, 4, deadline="60s")
    planning = submit_job(store, tmp_path / "b", deadline="60s")
    submit_job(store, tmp_path / "c", 4, deadline="2h", priority="low")
    finish_shard(store, storage, claim_next(store))
    clock.now += 59
    assert store.expire_jobs() == []
    clock.now += 1
    assert sorted(store.expire_jobs()) == sorted([job.job_id, planning.job_id])
    assert store.expire_jobs() == []
    assert sorted(store.drain_stopped()) == sorted([job.job_id, planning.job_id])
    status = store.status(job.job_id)
    assert (status.state, status.message, status.completed) == ("expired", "its deadline passed", 4)


def test_a_resumed_job_has_no_deadline_that_passed(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4, deadline="60s")
    store.stop_job(job.job_id, JobState.CANCELLED)
    store.drain_stopped()
    store.resume_job(job.job_id)
    assert store.load_job(job.job_id).deadline_at == clock.now + 60
    clock.now += 60
    store.expire_jobs()
    store.drain_stopped()
    assert store.resume_job(job.job_id) == JobState.IN_PROGRESS
    assert store.load_job(job.job_id).deadline_at is None
    assert store.expire_jobs() == []
    assert claim_next(store)


def test_too_many_errors_stop_a_job_as_failed(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    finish_shard(store, storage, claim_next(store), num_errors=2)
    assert not store.stop_if_too_many_errors(job.job_id, 2)
    assert store.stop_if_too_many_errors(job.job_id, 1)
    assert not store.stop_if_too_many_errors(job.job_id, 1)
    assert store.drain_stopped() == [job.job_id]
    ended = store.load_job(job.job_id)
    assert (ended.state, ended.message) == (JobState.FAILED, "2 rows failed, --max-errors is 1")


def test_errors_that_a_retry_takes_out_are_not_too_many(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    for _ in range(2):
        finish_shard(store, storage, claim_next(store), num_errors=2)
    store.stop_if_too_many_errors(job.job_id, 3)
    store.drain_stopped()
    assert store.retry_failed(job.job_id) == 4
    finish_shard(store, storage, claim_next(store), num_errors=1)
    assert not store.stop_if_too_many_errors(job.job_id, 3)
