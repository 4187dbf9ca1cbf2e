"""Jobs of the queue before their first shard: one per key, planned once, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.jobs.errors import JobIsLive, RefusedError
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import Submitted
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    OTHER_PLACE,
    SCHEMA,
    SOURCES,
    Clock,
    claim_next,
    create_job,
    dead_owner,
    start_job,
    submit_job,
)


def build_spec(output: str, **fields: object) -> JobSpec:
    return JobSpec.model_validate({"input": ["in.jsonl"], "output": output, "model": "null"} | fields)


def test_a_submitted_job_waits_to_be_planned(store: Store, clock: Clock, out: Path) -> None:
    spec = build_spec(
        str(out), priority="high", not_before="1h", deadline="2h", dtype="float32", on_complete="a.b@q"
    )
    job, is_new = store.submissions.submit(spec, "key-1")
    assert is_new
    assert (job.state, job.runner, job.output, job.model) == ("validating", Runner.WORKERS, str(out), "null")
    assert (job.identity, job.fingerprint, job.part_schema, job.num_shards) == ("", "", b"", 0)
    assert (job.priority, job.dtype, job.on_complete, job.idempotency_key) == (
        "high",
        "float32",
        "a.b@q",
        "key-1",
    )
    assert (job.not_before, job.deadline_at) == (clock.now + 3600, clock.now + 7200)
    assert JobSpec.model_validate(job.spec) == spec
    assert store.plans.waiting() == [job.job_id]


@pytest.mark.parametrize(("field", "value"), [("quantization", "int4"), ("kv_dtype", "fp8")])
def test_what_is_a_workers_choice_is_refused(store: Store, out: Path, field: str, value: str) -> None:
    flag = f"--{field.replace('_', '-')} {value}"
    with pytest.raises(RefusedError, match=f"a worker's choice: start workers with {flag}"):
        store.submissions.submit(build_spec(str(out), **{field: value}), "key-1")
    assert store.plans.waiting() == []


def test_one_key_is_one_job(store: Store, out: Path) -> None:
    first = store.submissions.submit(build_spec(str(out)), "key-1")
    again = store.submissions.submit(build_spec(str(out / "other")), "key-1")
    assert again == Submitted(first.job, False)
    assert store.submissions.submit_refused({}, "key-1", "no").job_id == first.job.job_id
    keyless = [store.submissions.submit(build_spec(str(out))).job.job_id for _ in range(2)]
    assert len({first.job.job_id, *keyless}) == 3


@pytest.mark.parametrize(("output", "kept"), [("s3://bucket/x/", "s3://bucket/x"), ("/o/../p/", "/p")])
def test_an_output_has_one_spelling(store: Store, output: str, kept: str) -> None:
    job = store.submissions.submit(build_spec(output)).job
    assert job.output == kept
    assert store.jobs.find(output) == job
    assert store.jobs.of_output(output + "/") == [job]


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        ({}, "k" * 256, "256 characters: give 1 to 255"),
        ({}, "", "0 characters"),
        ({"output": "/o\0ut"}, None, "output is"),
        ({"model": "nul\udce4"}, None, "model is"),
    ],
)
def test_a_submission_that_no_database_can_hold_is_refused(
    store: Store, out: Path, fields: dict[str, str], key: str | None, message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        store.submissions.submit(build_spec(str(out)).model_copy(update=fields), key)


def test_an_order_that_cannot_be_read_becomes_a_failed_job(store: Store, clock: Clock) -> None:
    fields = {"output": "/x/\0", "modell": "\udcff", "on_complete": "task", "temperature": float("nan")}
    job = store.submissions.submit_refused(
        json.loads(json.dumps(fields)), "k" * 300, "modell is not\0 an option"
    )
    assert (job.state, job.message) == (JobState.FAILED, "modell is not� an option")
    assert (job.model, job.output, job.finished_at) == ("", "/x/�", clock.now)
    assert job.idempotency_key == "k" * 255
    assert store.notices.due()[0].payload["state"] == "failed"
    plain = store.submissions.submit_refused({"output": 3, "on_complete": "rm -rf"}, None, "output is 3")
    assert (plain.output, plain.on_complete) == ("", None)
    assert store.plans.waiting() == []


def test_one_worker_plans_a_job(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out)
    assert store.plans.claim("job_unknown", ELSEWHERE) is None
    planned = store.plans.claim(job.job_id, ELSEWHERE)
    assert planned is not None and planned.spec == job.spec
    assert store.plans.claim(job.job_id, ELSEWHERE) is None, "another thread of the same worker"
    assert store.plans.waiting() == []
    clock.now += 50
    assert store.plans.renew(job.job_id, ELSEWHERE)
    clock.now += 50
    assert store.plans.claim(job.job_id, OTHER_PLACE) is None
    clock.now += 11
    assert store.plans.waiting() == [job.job_id]
    assert store.plans.claim(job.job_id, OTHER_PLACE)
    assert not store.plans.renew(job.job_id, ELSEWHERE)
    store.plans.release(job.job_id, ELSEWHERE)
    assert store.plans.claim(job.job_id, current_owner()) is None
    store.plans.release(job.job_id, OTHER_PLACE)
    assert store.plans.claim(job.job_id, current_owner())


def test_the_plan_of_a_dead_worker_is_taken_over_at_once(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    store.plans.claim(job.job_id, dead_owner())
    assert store.plans.waiting() == [job.job_id]
    assert store.plans.claim(job.job_id, current_owner())


def test_a_job_starts_once(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    store.plans.claim(job.job_id, ELSEWHERE)
    assert start_job(store, job, 4, 2, prefix_key="p" * 32)
    assert not start_job(store, job, 4, 2)
    started = store.jobs.load(job.job_id)
    assert (started.state, started.num_rows, started.num_shards) == (JobState.IN_PROGRESS, 6, 2)
    assert (started.sources, started.columns, started.prefix_key) == (tuple(SOURCES), ("text",), "p" * 32)
    assert started.part_schema == SCHEMA.serialize().to_pybytes()
    assert store.jobs.status(job.job_id).shards == {"queued": 2}
    assert store.plans.claim(job.job_id, ELSEWHERE) is None
    assert not store.plans.refuse(job.job_id, "too late")


def test_a_plan_that_fails_says_why(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    assert store.plans.refuse(job.job_id, "input 'x*' matches no file")
    failed = store.jobs.load(job.job_id)
    assert (failed.state, failed.message) == (JobState.FAILED, "input 'x*' matches no file")
    assert not start_job(store, job, 4)
    assert store.ends.resume(job.job_id) == JobState.VALIDATING
    assert store.jobs.load(job.job_id).message is None
    assert store.plans.waiting() == [job.job_id]


def test_a_job_cancelled_while_it_was_planned_does_not_start(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    store.plans.claim(job.job_id, ELSEWHERE)
    assert store.ends.request_cancel(job.job_id) == JobState.CANCELLING
    assert not start_job(store, job, 4)
    with pytest.raises(RefusedError, match="stopped before it was planned"):
        store.plans.take_over_output(job.job_id)
    assert store.ends.drain_stopped() == [job.job_id]
    assert store.jobs.status(job.job_id).state == "cancelled"


def test_two_jobs_of_one_folder_do_not_run_at_once(store: Store, clock: Clock, out: Path) -> None:
    running = submit_job(store, out, 4)
    later = submit_job(store, out)
    with pytest.raises(RefusedError, match=f"belongs to job {running.job_id}, which is in_progress"):
        start_job(store, later, 4)
    assert store.jobs.load(later.job_id).state == JobState.VALIDATING


def test_an_overwrite_waits_for_the_workers_of_the_earlier_job(store: Store, clock: Clock, out: Path) -> None:
    earlier = submit_job(store, out, 4, 4)
    claim = claim_next(store, ELSEWHERE)
    clock.now += 1
    later = submit_job(store, out)
    with pytest.raises(JobIsLive, match="process 7 on elsewhere"):
        store.plans.take_over_output(later.job_id)
    clock.now += 61
    store.plans.take_over_output(later.job_id)
    assert (store.jobs.load(earlier.job_id).state, store.jobs.status(earlier.job_id).shards) == (
        JobState.CANCELLED,
        {"cancelled": 2},
    )
    assert not store.shards.release(claim)
    assert start_job(store, later, 4)
    with pytest.raises(RefusedError, match=later.job_id):
        store.ends.resume(earlier.job_id)


def test_an_overwrite_waits_for_the_planner_of_the_earlier_job(store: Store, clock: Clock, out: Path) -> None:
    earlier = submit_job(store, out)
    store.plans.claim(earlier.job_id, ELSEWHERE)
    clock.now += 1
    later = submit_job(store, out)
    with pytest.raises(JobIsLive):
        store.plans.take_over_output(later.job_id)
    store.plans.release(earlier.job_id, ELSEWHERE)
    store.plans.take_over_output(later.job_id)
    assert not start_job(store, earlier, 4)


def test_an_earlier_job_does_not_take_the_folder_from_a_later_one(
    store: Store, clock: Clock, out: Path
) -> None:
    earlier = submit_job(store, out)
    clock.now += 1
    later = submit_job(store, out, 4)
    with pytest.raises(RefusedError, match=f"later job {later.job_id}"):
        store.plans.take_over_output(earlier.job_id)


def test_a_job_that_was_never_planned_took_no_folder(store: Store, clock: Clock, out: Path) -> None:
    earlier = submit_job(store, out, 4)
    store.ends.stop(earlier.job_id, JobState.CANCELLED)
    store.ends.drain_stopped()
    clock.now += 1
    refused = submit_job(store, out)
    store.plans.refuse(refused.job_id, "belongs to another job")
    assert store.ends.resume(earlier.job_id) == JobState.IN_PROGRESS


def test_a_local_run_does_not_take_a_job_from_the_workers(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4)
    with pytest.raises(RefusedError, match="queue's workers"):
        store.jobs.hold(job.job_id, current_owner())
    claim_next(store, ELSEWHERE)
    clock.now += 1
    with pytest.raises(JobIsLive):
        create_job(store, out, 4, owner=current_owner())
    clock.now += 61
    create_job(store, out, 4, owner=current_owner())
    assert store.jobs.load(job.job_id).state == JobState.CANCELLED


def test_local_jobs_are_not_the_queues(store: Store, out: Path) -> None:
    create_job(store, out, 4, dtype="float32")
    offer = OFFER._replace(name="null:")
    assert not store.claims.has_work(offer)
    assert store.claims.next(offer, ELSEWHERE) is None
    unplanned = JobSpec(input=["a"], output=f"{out}-2", model="null")
    store.submissions.submit_own(unplanned, ELSEWHERE, "f" * 32, "i" * 32)
    assert store.claims.wanted_models() == store.plans.waiting() == store.finalizing.waiting() == []  # type: ignore[comparison-overlap]
