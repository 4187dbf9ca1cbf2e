"""Which submitted job gets an output folder, and what happens to the files in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan import planner
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.plan.planner import plan_submitted_job
from gristmill.jobs.records import JobRecord
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.store import Store
from tests.jobs.cases import OTHER_PLACE, Clock, claim_next, finish_shard, run_queue

OWNER = current_owner()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'{"prompt": "one"}\n' * 300)
    return folder


def submit(store: Store, data: Path, **spec: Any) -> JobRecord:
    given = {"input": [f"{data}/*"], "output": str(data.parent / "out"), "model": "null"} | spec
    return store.submissions.submit(JobSpec(**given)).job


def plan(store: Store, job: JobRecord, data: Path) -> list[int]:
    return plan_submitted_job(store, job.job_id, OWNER, [str(data.parent)])


def plan_new(store: Store, data: Path, **spec: Any) -> JobRecord:
    job = submit(store, data, **spec)
    assert plan(store, job, data) == []
    return store.jobs.load(job.job_id)


def test_of_two_jobs_with_one_output_the_earlier_gets_it(store: Store, data: Path, clock: Clock) -> None:
    first = submit(store, data)
    clock.now += 1.0
    second = submit(store, data, seed=2)
    plan(store, second, data)
    plan(store, first, data)
    assert store.jobs.load(first.job_id).state is JobState.IN_PROGRESS
    refused = store.jobs.load(second.job_id)
    assert refused.state is JobState.FAILED
    assert f"belongs to job {first.job_id}, which is validating" in (refused.message or "")


def run_to_end(store: Store, data: Path) -> JobRecord:
    job = plan_new(store, data)
    run_queue(store, open_storage(job.output))
    with_parts = store.jobs.load(job.job_id)
    assert with_parts.rows_committed == 300
    return with_parts


def test_a_folder_that_holds_the_same_job_is_refused_with_the_way_to_go_on(
    store: Store, data: Path, clock: Clock
) -> None:
    job = run_to_end(store, data)
    clock.now += 1.0
    again = plan_new(store, data)
    assert again.state is JobState.FAILED
    assert f"belongs to job {job.job_id}, which is in_progress" in (again.message or "")
    store.ends.stop(job.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    for _ in range(2):  # the jobs that were refused never had the folder
        clock.now += 1.0
        again = plan_new(store, data)
        assert again.state is JobState.FAILED and f"`gristmill resume {job.job_id}`" in (again.message or "")


def test_a_folder_with_the_parts_of_another_job_is_refused(store: Store, data: Path, clock: Clock) -> None:
    job = run_to_end(store, data)
    store.ends.stop(job.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    clock.now += 1.0
    other = plan_new(store, data, seed=5)
    assert other.state is JobState.FAILED
    assert job.job_id in (other.message or "") and "overwrite" in (other.message or "")


def test_overwrite_replaces_a_stopped_job_and_its_files(store: Store, data: Path, clock: Clock) -> None:
    run_to_end(store, data)
    parts = list((data.parent / "out").glob("part-*"))
    assert parts
    clock.now += 1.0
    job = plan_new(store, data, seed=5, if_exists="overwrite")
    assert job.state is JobState.IN_PROGRESS, job.message
    assert not list((data.parent / "out").glob("part-*"))


def test_overwrite_keeps_the_files_when_the_new_job_can_not_be_planned(
    store: Store, data: Path, clock: Clock
) -> None:
    run_to_end(store, data)
    (data / "b.parquet").write_bytes(b"PAR1")
    clock.now += 1.0
    assert plan_new(store, data, if_exists="overwrite").state is JobState.FAILED
    assert list((data.parent / "out").glob("part-*"))


def test_overwrite_does_not_take_a_folder_from_a_job_at_work(store: Store, data: Path, clock: Clock) -> None:
    job = plan_new(store, data, shard_rows=100)
    finish_shard(store, open_storage(job.output), claim_next(store))
    claim_next(store)
    clock.now += 1.0
    other = plan_new(store, data, seed=5, if_exists="overwrite")
    assert other.state is JobState.FAILED and job.job_id in (other.message or "")
    assert list((data.parent / "out").glob("part-*"))


def test_a_planner_that_lost_its_lease_removes_nothing(
    store: Store, data: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_to_end(store, data)
    clock.now += 1.0
    job = submit(store, data, seed=5, if_exists="overwrite")

    def lose(*_: object, **__: object) -> Any:
        clock.now += 1000.0
        assert store.plans.claim(job.job_id, OTHER_PLACE) is not None
        return plan_shards(load_sources([str(data)]))

    monkeypatch.setattr(planner, "plan_order", lose)
    assert plan(store, job, data) == []
    assert list((data.parent / "out").glob("part-*"))
    assert store.jobs.load(job.job_id).state is JobState.VALIDATING


def test_a_job_that_failed_before_its_first_row_may_be_sent_again(
    store: Store, data: Path, clock: Clock
) -> None:
    first = plan_new(store, data)
    store.ends.stop(first.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    clock.now += 1.0
    again = plan_new(store, data)
    assert again.state is JobState.IN_PROGRESS and again.identity == first.identity
