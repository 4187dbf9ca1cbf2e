"""Ended jobs: resumed, their failed rows run again, and deleted at last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gristmill.jobs.errors import RefusedError, StoreError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.parts import strip_errors
from gristmill.jobs.records import WorkerModel
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.models import metadata, shards
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    SCHEMA,
    SOURCES,
    Clock,
    build_pieces,
    cancel,
    claim_next,
    claim_or_fail,
    commit_rows,
    count_rows,
    create_job,
    finish_shard,
    read_rows,
    run_queue,
    submit_job,
)


def complete(store: Store, storage: Storage, out: Path, *shard_rows: int, num_errors: int = 2) -> str:
    """A completed job; of every shard with rows `num_errors` are errors."""
    job = submit_job(store, out, *shard_rows)
    while claim := store.claims.next(OFFER, ELSEWHERE):
        finish_shard(store, storage, claim, num_errors=num_errors)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    return job.job_id


def test_a_retry_runs_the_failed_rows_only(store: Store, storage: Storage, out: Path) -> None:
    job_id = complete(store, storage, out, 4, 3)
    before = store.jobs.status(job_id)
    assert (before.completed, before.failed, before.errors_by_code) == (3, 4, {"null_value": 4})
    assert store.ends.retry_failed(job_id) == 4
    assert store.jobs.load(job_id).state == JobState.IN_PROGRESS
    claim = claim_next(store)
    assert claim.strip_errors and claim.part is not None
    part, counts, stats = strip_errors(storage, claim, SCHEMA, SOURCES, "parquet")
    assert store.shards.commit(claim, part, counts, stats, clear_strip=True)
    stripped = store.jobs.status(job_id)
    assert (stripped.completed, stripped.failed, stripped.not_run) == (3, 2, 2)
    assert stripped.errors_by_code == {"null_value": 2}
    claim = replace(claim, part=part, strip_errors=False)
    finish_shard(store, storage, claim, num_errors=0)
    run_queue(store, storage)
    assert finalize_job(store, storage, job_id, ELSEWHERE) == JobState.COMPLETED
    after = store.jobs.status(job_id)
    assert (after.completed, after.failed, after.errors_by_code) == (7, 0, {})
    assert read_rows(out) == list(range(7))
    assert after.percentiles["queue_wait_s"]["p50"] == pytest.approx(0.5, rel=0.05)


def test_the_figures_stay_whole_while_a_retry_runs(store: Store, storage: Storage, out: Path) -> None:
    job_id = complete(store, storage, out, 4, 3, 5)
    before = store.jobs.status(job_id)
    store.ends.retry_failed(job_id)
    during = store.jobs.status(job_id)
    assert during.errors_by_code == before.errors_by_code
    assert during.percentiles == before.percentiles
    assert (during.completed, during.failed, during.not_run) == (before.completed, before.failed, 0)


def test_a_retry_leaves_shards_without_errors_alone(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    finish_shard(store, storage, claim_next(store), num_errors=0)
    finish_shard(store, storage, claim_next(store), num_errors=1)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.ends.retry_failed(job.job_id) == 1
    assert claim_next(store).range.shard_index == 1
    assert not store.claims.has_work(OFFER)


def test_a_strip_whose_reply_was_lost_counts_once(store: Store, storage: Storage, out: Path) -> None:
    job_id = complete(store, storage, out, 4)
    store.ends.retry_failed(job_id)
    claim = claim_next(store)
    strip = strip_errors(storage, claim, SCHEMA, SOURCES, "parquet")
    for _ in range(2):
        assert store.shards.commit(claim, *strip, clear_strip=True)
    assert count_rows(store, job_id) == (2, 0, 2)


def test_a_shard_is_not_done_before_its_error_rows_are_out(store: Store, storage: Storage, out: Path) -> None:
    job_id = complete(store, storage, out, 4)
    store.ends.retry_failed(job_id)
    claim = claim_next(store)
    with pytest.raises(AssertionError, match="error rows are out"):
        store.shards.commit(claim, None, ShardCounts(), JobStats(), complete=True)
    assert store.jobs.status(job_id).shards == {"running": 1}


def test_a_stop_before_the_strip_loses_nothing(store: Store, storage: Storage, out: Path) -> None:
    job_id = complete(store, storage, out, 4)
    store.ends.retry_failed(job_id)
    store.shards.release(claim_next(store))
    cancel(store, store.jobs.load(job_id))
    assert count_rows(store, job_id) == (2, 2, 0)
    store.ends.resume(job_id)
    assert claim_next(store).strip_errors


def test_a_retry_takes_undone_shards_along(store: Store, storage: Storage, out: Path) -> None:
    job = submit_job(store, out, 4, 4, 4)
    finish_shard(store, storage, claim_next(store), num_errors=1)
    commit_rows(store, storage, claim_next(store), 4, 9 - 4, requeue=True)
    cancel(store, job)
    assert store.ends.retry_failed(job.job_id) == 1
    run_queue(store, storage)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_rows(out) == list(range(12))


def test_a_retry_of_a_local_job_is_the_same(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 10)
    commit_rows(store, storage, claim_or_fail(store, job), *range(10), complete=True)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.ends.retry_failed(job.job_id) == 1
    assert claim_or_fail(store, job).strip_errors


@pytest.mark.parametrize("num_errors", [0, 1])
def test_what_cannot_be_retried_is_refused(
    store: Store, storage: Storage, out: Path, num_errors: int
) -> None:
    job = submit_job(store, out, 4)
    finish_shard(store, storage, claim_next(store), num_errors=num_errors)
    with pytest.raises(RefusedError, match="is in_progress: wait"):
        store.ends.retry_failed(job.job_id)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    if num_errors:
        assert store.ends.retry_failed(job.job_id) == 1
    else:
        with pytest.raises(RefusedError, match="no failed rows"):
            store.ends.retry_failed(job.job_id)
    with pytest.raises(StoreError, match="no job job_x"):
        store.ends.retry_failed("job_x")


def test_a_job_whose_folder_was_given_away_is_not_retried(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job_id = complete(store, storage, out, 4)
    clock.now += 1
    later = submit_job(store, out, 4)
    with pytest.raises(RefusedError, match=later.job_id):
        store.ends.retry_failed(job_id)


def test_old_jobs_are_deleted_with_all_that_is_theirs(
    store: Store, storage: Storage, clock: Clock, tmp_path: Path, out: Path
) -> None:
    old = complete(store, storage, out, 4, 4)
    refused = submit_job(store, tmp_path / "b")
    store.pieces.save_all(refused.job_id, SOURCES, [], b"", "i", build_pieces(3))
    store.plans.refuse(refused.job_id, "no")
    store.workers.register("w-old", ELSEWHERE, [WorkerModel("null", "f", "float32", True)], "1")
    pending = submit_job(store, tmp_path / "c", 4, model="other")
    clock.now += 1000
    store.workers.register("w-new", ELSEWHERE, [], "1")
    recent = complete(store, open_storage(str(tmp_path / "d")), tmp_path / "d", 2)
    assert store.ends.clean(1001) == ((), 0)
    report = store.ends.clean(999)
    assert set(report.job_ids) == {old, refused.job_id}
    assert report.num_workers == 1
    assert {job.job_id for job in store.jobs.newest()} == {pending.job_id, recent}
    assert read_rows(out) == list(range(8)), "files are not touched"
    with store.database.read() as (connection, _):
        rest = {
            table.name: connection.scalar(select(func.count()).select_from(table))
            for table in metadata.tables.values()
        }
    assert (rest["jobs"], rest["shards"], rest["plan_pieces"], rest["workers"]) == (2, 2, 0, 1)


def test_a_job_resumed_meanwhile_is_not_deleted(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4)
    cancel(store, job)
    clock.now += 1000
    store.ends.resume(job.job_id)
    assert not store.ends._delete_job(job.job_id, 10)
    with store.database.read() as (connection, _):
        assert connection.scalar(select(func.count()).select_from(shards)) == 1


@pytest.mark.parametrize("pause_s", [20.0, 3600.0])
def test_the_pause_before_a_retry_is_no_active_time(
    store: Store, storage: Storage, out: Path, clock: Clock, pause_s: float
) -> None:
    job_id = complete(store, storage, out, 4)
    before_s = store.jobs.status(job_id).elapsed_s
    clock.now += pause_s
    store.ends.retry_failed(job_id)
    clock.now += pause_s
    claim_next(store)
    clock.now += 5.0
    store.jobs.touch([job_id], ELSEWHERE)
    assert store.jobs.status(job_id).elapsed_s == pytest.approx(before_s + 5.0)


def test_a_folder_is_that_of_its_job_and_not_of_one_that_was_refused(
    store: Store, out: Path, clock: Clock
) -> None:
    job = submit_job(store, out, 4)
    clock.now += 1.0  # jobs of one moment have no order
    refused = store.submissions.submit(JobSpec(input=["/data/x.jsonl"], output=str(out), model="m")).job
    assert store.jobs.find(str(out)) == store.jobs.load(refused.job_id)  # until it is known to be wrong
    store.plans.refuse(refused.job_id, "no such column")
    found = store.jobs.find(str(out))
    assert found is not None and found.job_id == job.job_id
