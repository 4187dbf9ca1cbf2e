"""Jobs: created, found, held by one process, cancelled, failed, resumed, and told in numbers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import insert, select, update

from gristmill.jobs.errors import JobIsLive, RefusedError, StoreError
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import JobRecord, Signal
from gristmill.jobs.states import JobState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.models import events, shards
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    SCHEMA,
    SOURCES,
    Clock,
    claim_or_fail,
    commit_rows,
    create_job,
    dead_owner,
    run_all,
    run_job,
)


def test_a_job_comes_back_as_it_was_created(store: Store, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 4, 4, max_tokens=16)
    again = store.jobs.load(job.job_id)
    assert again == job
    assert (job.state, job.num_rows, job.num_shards, job.rows_committed) == (JobState.IN_PROGRESS, 8, 2, 0)
    assert (job.sources, job.output, job.created_at) == (tuple(SOURCES), str(out), clock.now)
    assert job.spec["max_tokens"] == 16
    assert SCHEMA.serialize().to_pybytes() == job.part_schema


def test_a_job_is_found_by_id_prefix_or_folder(store: Store, clock: Clock, tmp_path: Path) -> None:
    first = create_job(store, tmp_path / "a", 1)
    clock.now += 1
    second = create_job(store, tmp_path / "b", 1)
    assert store.jobs.find(second.job_id) == second
    assert store.jobs.find(second.job_id[:20]) == second
    assert store.jobs.find(str(tmp_path / "a") + "/") == first
    assert store.jobs.find("job_zzz") is None
    assert store.jobs.find("job%") is None
    with pytest.raises(RefusedError, match="several job ids"):
        store.jobs.find("job_")
    assert [job.job_id for job in store.jobs.newest()] == [second.job_id, first.job_id]
    assert store.jobs.newest(limit=1) == [second]
    clock.now += 1
    newest = create_job(store, tmp_path / "a", 1)
    assert store.jobs.find(str(tmp_path / "a")) == newest


def test_an_unknown_job_is_named(store: Store) -> None:
    with pytest.raises(StoreError, match="no job job_x"):
        store.jobs.status("job_x")


def test_a_job_held_by_a_live_process_is_refused_to_others(store: Store, out: Path) -> None:
    job = create_job(store, out, 1)
    me = current_owner()
    store.jobs.hold(job.job_id, me)
    store.jobs.hold(job.job_id, me)
    with pytest.raises(JobIsLive, match=f"process {me.pid} on"):
        store.jobs.hold(job.job_id, ELSEWHERE)
    store.jobs.release(job.job_id, ELSEWHERE)
    with pytest.raises(JobIsLive):
        store.jobs.hold(job.job_id, ELSEWHERE)
    store.jobs.release(job.job_id, me)
    store.jobs.hold(job.job_id, ELSEWHERE)


def test_the_hold_of_a_dead_process_is_taken_over_at_once(store: Store, out: Path) -> None:
    job = create_job(store, out, 1, owner=dead_owner())
    store.jobs.hold(job.job_id, current_owner())
    assert store.jobs.status(job.job_id).owner == str(current_owner())


def test_the_hold_of_another_host_ends_with_its_lease(store: Store, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 1, owner=ELSEWHERE)
    clock.now += 50
    store.jobs.touch([job.job_id], ELSEWHERE)
    clock.now += 50
    with pytest.raises(JobIsLive, match="process 7 on elsewhere"):
        store.jobs.hold(job.job_id, current_owner())
    clock.now += 11
    store.jobs.hold(job.job_id, current_owner())


def test_a_new_job_takes_the_folder_over_from_a_dead_one_only(store: Store, clock: Clock, out: Path) -> None:
    old = create_job(store, out, 2, owner=current_owner())
    claim = claim_or_fail(store, old, current_owner())
    with pytest.raises(JobIsLive):
        create_job(store, out, 2, owner=ELSEWHERE)
    store.jobs.release(old.job_id, current_owner())
    clock.now += 1
    new = create_job(store, out, 2, owner=ELSEWHERE)
    replaced = store.jobs.load(old.job_id)
    assert (replaced.state, replaced.message) == (
        JobState.CANCELLED,
        f"its output folder was given to {new.job_id}",
    )
    assert set(store.shards.heartbeat([claim], {}).signal_by_job.values()) == {Signal.CANCEL}
    with pytest.raises(RefusedError, match=new.job_id):
        store.ends.resume(old.job_id)


def test_a_cancel_waits_for_the_live_owner_and_its_rows_are_kept_for_a_resume(
    store: Store, storage: Storage, out: Path
) -> None:
    job = create_job(store, out, 4, 4)
    claim = claim_or_fail(store, job)
    assert store.ends.request_cancel(job.job_id) == JobState.CANCELLING
    assert not store.ends.finish_cancel(job.job_id)
    assert commit_rows(store, storage, claim, 0, 1, requeue=True)
    assert store.ends.finish_cancel(job.job_id)
    status = store.jobs.status(job.job_id)
    assert (status.state, status.completed, status.not_run) == ("cancelled", 2, 6)
    assert status.shards == {"cancelled": 2}
    assert store.ends.finish_cancel(job.job_id)
    assert store.ends.request_cancel(job.job_id) == JobState.CANCELLED
    assert [store.ends.resume(job.job_id) for _ in range(2)] == [JobState.IN_PROGRESS] * 2
    assert store.jobs.load(job.job_id).finished_at is None
    again = claim_or_fail(store, job)
    assert again.part is not None and again.part.rows == 2


def test_a_completed_job_cannot_be_cancelled_failed_or_resumed(
    store: Store, storage: Storage, out: Path
) -> None:
    job = run_job(store, storage, out, 2)
    claim = store.finalizing.claim(job.job_id, ELSEWHERE)
    assert claim is not None
    assert store.finalizing.complete(claim, JobState.COMPLETED)
    assert store.ends.request_cancel(job.job_id) == JobState.COMPLETED
    assert not store.ends.stop(job.job_id, JobState.FAILED, "late")
    assert store.ends.resume(job.job_id) == JobState.COMPLETED
    assert not store.finalizing.complete(claim, JobState.FAILED)


def test_too_many_errors_fail_the_job_and_stop_its_workers(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 4)
    claim = claim_or_fail(store, job)
    assert store.ends.stop(job.job_id, JobState.FAILED, "3 rows failed, --max-errors is 2")
    assert set(store.shards.heartbeat([claim], {}).signal_by_job.values()) == {Signal.CANCEL}
    assert commit_rows(store, storage, claim, 0, 1, requeue=True)
    assert store.ends.finish_cancel(job.job_id)
    status = store.jobs.status(job.job_id)
    assert (status.state, status.message, status.completed) == (
        "failed",
        "3 rows failed, --max-errors is 2",
        2,
    )
    assert store.ends.resume(job.job_id) == JobState.IN_PROGRESS
    assert store.jobs.status(job.job_id).message is None


def test_one_process_finalizes_at_a_time_and_one_that_is_gone_is_followed(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = run_job(store, storage, out, 2)
    assert store.finalizing.waiting() == [job.job_id]
    first = store.finalizing.claim(job.job_id, ELSEWHERE)
    assert first is not None
    assert store.finalizing.claim(job.job_id, OTHER_PLACE) is None
    clock.now += 50
    assert store.finalizing.renew(first)
    clock.now += 50
    assert store.finalizing.claim(job.job_id, OTHER_PLACE) is None
    assert store.finalizing.waiting() == []
    clock.now += 11
    assert store.finalizing.waiting() == [job.job_id]
    assert store.finalizing.claim(job.job_id, dead_owner())
    assert store.finalizing.waiting() == [job.job_id]
    last = store.finalizing.claim(job.job_id, current_owner())
    assert last is not None and store.finalizing.waiting() == []
    assert not store.finalizing.renew(first)
    assert not store.finalizing.complete(first, JobState.COMPLETED)
    assert store.finalizing.complete(last, JobState.COMPLETED)


def work_for(store: Store, clock: Clock, job: JobRecord, seconds: int) -> None:
    store.jobs.hold(job.job_id, ELSEWHERE)
    for _ in range(seconds):
        clock.now += 1
        store.jobs.touch([job.job_id], ELSEWHERE)


def test_elapsed_time_leaves_pauses_out(store: Store, storage: Storage, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 100)
    work_for(store, clock, job, 10)
    store.jobs.release(job.job_id, ELSEWHERE)
    clock.now += 1000
    work_for(store, clock, job, 10)
    claim = claim_or_fail(store, job)
    commit_rows(store, storage, claim, *range(50))
    work_for(store, clock, job, 5)
    status = store.jobs.status(job.job_id)
    assert (status.elapsed_s, status.rows_per_s, status.eta_s) == (25, 2, 25)
    assert status.completion_tokens_per_s == 3 * 45 / 25
    assert status.tokens_per_s == 8 * 45 / 25
    assert status.saved_tokens_share == 2 / 5
    assert status.owner == "process 7 on elsewhere"


def test_the_speed_of_earlier_jobs_is_learned(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = create_job(store, out, 100, max_tokens=8)
    assert store.jobs.learned_rows_per_s(job.fingerprint, 8) is None
    work_for(store, clock, job, 10)
    run_all(store, storage, job)
    assert store.jobs.learned_rows_per_s(job.fingerprint, 8) == 10
    assert store.jobs.learned_rows_per_s(job.fingerprint, None) is None
    assert store.jobs.learned_rows_per_s("another", 8) is None


def test_a_status_of_a_thousand_shards_answers_within_50_ms(store: Store, out: Path) -> None:
    job = create_job(store, out, *[0] * 1000)
    stats = JobStats(errors_by_code={"null_value": 1, "empty_prompt": 2})
    for step in range(60):
        stats.record_latency(0.01 * 1.1**step, 0.02 * 1.1**step, 0.001 * 1.05**step)
    for index in range(5):
        claim = claim_or_fail(store, job)
        store.shards.commit(claim, None, ShardCounts(), stats, complete=index < 3)
    with store.database.write() as (connection, _):
        values = {"rows_completed": 97, "rows_failed": 3, "state": "done"}
        connection.execute(update(shards).where(shards.c.state == "queued").values(values))
    best = 1.0
    for _ in range(10):
        start = time.perf_counter()
        status = store.jobs.status(job.job_id)
        best = min(best, time.perf_counter() - start)
    assert (status.completed, status.failed) == (97 * 995, 3 * 995)
    assert status.errors_by_code == {"empty_prompt": 10, "null_value": 5}
    assert status.shards == {"done": 998, "running": 2}
    assert best < 0.05


def test_events_are_kept(store: Store, out: Path) -> None:
    job = create_job(store, out, 4)
    store.jobs.record_event(job.job_id, "engine_restarted", {"exit_code": -9})
    with store.database.read() as (connection, _):
        rows = connection.execute(select(events.c.kind, events.c.detail).order_by(events.c.id)).all()
    assert [tuple(row) for row in rows] == [
        ("submitted", {}),
        ("planned", {"rows": 4, "shards": 1}),
        ("engine_restarted", {"exit_code": -9}),
    ]


def test_shards_belong_to_a_job(store: Store) -> None:
    with pytest.raises(StoreError, match="(?i)foreign key"), store.database.write() as (connection, _):
        values = {"shard_index": 0, "source_index": 0, "first_row": 0, "num_rows": 0, "num_records": 0}
        shard = insert(shards).values(job_id="job_x", state="queued", byte_offset=0, byte_size=0, **values)
        connection.execute(shard)
