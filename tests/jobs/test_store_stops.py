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
    cancel,
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
    assert store.ends.stop(job.job_id, state, "because")
    assert not store.ends.stop(job.job_id, JobState.CANCELLED), "the first stop counts"
    assert store.jobs.load(job.job_id).stopping_as == state
    assert store.claims.next(OFFER, ELSEWHERE) is None
    assert store.shards.heartbeat([claim], {}).signal_by_job == {job.job_id: Signal.CANCEL}
    assert store.ends.drain_stopped() == []
    assert store.jobs.status(job.job_id).shards == {"cancelled": 1, "running": 1}
    assert commit_rows(store, storage, claim, 0, 1, requeue=True)
    clock.now += 2
    assert store.ends.drain_stopped() == [job.job_id]
    ended = store.jobs.load(job.job_id)
    assert (ended.state, ended.message, ended.finished_at) == (state, "because", clock.now)
    assert ended.stopping_as is None
    status = store.jobs.status(job.job_id)
    assert (status.completed, status.not_run, status.shards) == (2, 6, {"cancelled": 2})
    assert store.ends.drain_stopped() == []


def test_a_stop_does_not_wait_for_the_dead(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    claim_next(store, dead_owner())
    lapsed = claim_next(store, ELSEWHERE)
    store.ends.request_cancel(job.job_id)
    assert store.ends.drain_stopped() == []
    clock.now += 61
    assert store.ends.drain_stopped() == [job.job_id]
    assert not store.shards.release(lapsed)


def test_a_shard_that_is_done_after_the_stop_counts(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4)
    claim = claim_next(store)
    store.ends.request_cancel(job.job_id)
    finish_shard(store, storage, claim)
    assert store.ends.drain_stopped() == [job.job_id]
    assert (store.jobs.status(job.job_id).state, store.jobs.status(job.job_id).completed) == ("cancelled", 4)
    assert store.ends.resume(job.job_id) == JobState.IN_PROGRESS
    assert store.finalizing.waiting() == [job.job_id]


def test_the_reconciler_leaves_the_stops_of_local_runs_to_them(store: Store, out: Path) -> None:
    job = create_job(store, out, 4, owner=current_owner())
    store.ends.request_cancel(job.job_id)
    assert store.ends.drain_stopped() == []
    assert store.ends.finish_cancel(job.job_id)


def test_a_job_expires_at_its_deadline_and_keeps_its_rows(
    store: Store, storage: Storage, clock: Clock, tmp_path: Path, out: Path
) -> None:
    job = submit_job(store, out, 4, 4, deadline="60s")
    planning = submit_job(store, tmp_path / "b", deadline="60s")
    submit_job(store, tmp_path / "c", 4, deadline="2h", priority="low")
    finish_shard(store, storage, claim_next(store))
    clock.now += 59
    assert store.ends.expire() == []
    clock.now += 1
    assert sorted(store.ends.expire()) == sorted([job.job_id, planning.job_id])
    assert store.ends.expire() == []
    assert sorted(store.ends.drain_stopped()) == sorted([job.job_id, planning.job_id])
    status = store.jobs.status(job.job_id)
    assert (status.state, status.message, status.completed) == ("expired", "its deadline passed", 4)


def test_a_resumed_job_has_no_deadline_that_passed(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4, deadline="60s")
    cancel(store, job)
    store.ends.resume(job.job_id)
    assert store.jobs.load(job.job_id).deadline_at == clock.now + 60
    clock.now += 60
    store.ends.expire()
    store.ends.drain_stopped()
    assert store.ends.resume(job.job_id) == JobState.IN_PROGRESS
    assert store.jobs.load(job.job_id).deadline_at is None
    assert store.ends.expire() == []
    assert claim_next(store)


def test_too_many_errors_stop_a_job_as_failed(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    finish_shard(store, storage, claim_next(store), num_errors=2)
    assert not store.ends.stop_if_too_many_errors(job.job_id, 2)
    assert store.ends.stop_if_too_many_errors(job.job_id, 1)
    assert not store.ends.stop_if_too_many_errors(job.job_id, 1)
    assert store.ends.drain_stopped() == [job.job_id]
    ended = store.jobs.load(job.job_id)
    assert (ended.state, ended.message) == (JobState.FAILED, "2 rows failed, --max-errors is 1")


def test_errors_that_a_retry_takes_out_are_not_too_many(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    for _ in range(2):
        finish_shard(store, storage, claim_next(store), num_errors=2)
    store.ends.stop_if_too_many_errors(job.job_id, 3)
    store.ends.drain_stopped()
    assert store.ends.retry_failed(job.job_id) == 4
    finish_shard(store, storage, claim_next(store), num_errors=1)
    assert not store.ends.stop_if_too_many_errors(job.job_id, 3)
