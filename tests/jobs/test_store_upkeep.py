"""What the reconciler finds to do: jobs to finalize, notices to send; and which workers there are."""

from __future__ import annotations

from pathlib import Path

from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.records import Notice, WorkerModel
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    Clock,
    claim_next,
    create_job,
    dead_owner,
    finish_shard,
    run_queue,
    submit_job,
)

NULL = WorkerModel("null", "f" * 32, "float32", True)
OTHER = WorkerModel("other", "e" * 32, "bfloat16", False)


def test_a_job_is_finalized_once_its_last_shard_ended(
    store: Store, storage: Storage, clock: Clock, tmp_path: Path, out: Path
) -> None:
    job = submit_job(store, out, 2, 2, 2)
    submit_job(store, tmp_path / "planning")
    finish_shard(store, storage, claim_next(store))
    store.shards.fail(claim_next(store), "no luck")
    last = claim_next(store)
    assert store.finalizing.waiting() == []
    finish_shard(store, storage, last)
    assert store.finalizing.waiting() == [job.job_id]
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.FAILED
    assert store.finalizing.waiting() == []


def test_the_submitter_hears_of_the_end_until_it_says_so(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = submit_job(store, out, 10, on_complete="pipeline.done@mine", key="key-1")
    assert store.notices.due() == []
    run_queue(store, storage)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    (notice,) = store.notices.due()
    assert notice == Notice(
        job.job_id,
        "pipeline.done",
        "mine",
        1,
        {
            "job_id": job.job_id,
            "state": "completed",
            "message": None,
            "output": str(out),
            "rows": 10,
            "completed": 9,
            "failed": 1,
            "skipped": 0,
            "not_run": 0,
            "idempotency_key": "key-1",
        },
    )
    for number, delay in enumerate((15, 60, 300, 1800, 7200, 43200), start=1):
        assert [due.number for due in store.notices.due()] == [number]
        assert store.notices.mark_sent(job.job_id, number)
        assert not store.notices.mark_sent(job.job_id, number), "one of two senders wins"
        clock.now += delay - 1
        assert store.notices.due() == []
        clock.now += 1
    assert store.notices.mark_sent(job.job_id, 7)
    clock.now += 10**9
    assert store.notices.due() == []
    assert not store.notices.acknowledge(job.job_id)


def test_an_acknowledged_notice_is_not_sent_again(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = submit_job(store, out, 10, on_complete="pipeline.done")
    assert not store.notices.acknowledge(job.job_id), "nothing was sent yet"
    run_queue(store, storage)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.notices.due()[0].queue == "gristmill.callbacks"
    store.notices.mark_sent(job.job_id, 1)
    assert store.notices.acknowledge(job.job_id)
    clock.now += 10**6
    assert store.notices.due() == []
    store.ends.retry_failed(job.job_id)
    run_queue(store, storage)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.notices.due()[0].number == 1, "the retry has an end of its own"


def test_every_kind_of_end_is_told(store: Store, clock: Clock, tmp_path: Path) -> None:
    cancelled = submit_job(store, tmp_path / "a", 4, on_complete="t")
    store.ends.request_cancel(cancelled.job_id)
    store.ends.drain_stopped()
    refused = submit_job(store, tmp_path / "b", on_complete="t")
    store.plans.refuse(refused.job_id, "no such file")
    replaced = submit_job(store, tmp_path / "c", 4, on_complete="t")
    clock.now += 1
    store.plans.take_over_output(submit_job(store, tmp_path / "c").job_id)
    submit_job(store, tmp_path / "d", 4)
    told = {notice.job_id: notice.payload["state"] for notice in store.notices.due()}
    assert told == {cancelled.job_id: "cancelled", refused.job_id: "failed", replaced.job_id: "cancelled"}
    store.ends.resume(cancelled.job_id)
    assert cancelled.job_id not in {notice.job_id for notice in store.notices.due()}


def test_local_jobs_tell_nobody(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 0, on_complete="task")
    store.ends.stop(job.job_id, JobState.FAILED, "no")
    assert store.ends.finish_cancel(job.job_id)
    assert store.notices.due() == []


def test_the_models_known_are_those_of_workers_that_live(store: Store, clock: Clock) -> None:
    for name, owner, offered in (("gone", OTHER_PLACE, OTHER), ("dead", dead_owner(), OTHER)):
        store.workers.register(name, owner, [offered], "1")
    clock.now += 61
    store.workers.register("stopped", OTHER_PLACE, [OTHER], "1")
    store.workers.stop("stopped")
    store.workers.register("alive", OTHER_PLACE, [NULL], "1")
    states = {worker.worker_id: worker.state for worker in store.workers.load_all()}
    assert states == {"gone": "lost", "dead": "lost", "stopped": "stopped", "alive": "idle"}
    assert store.workers.known_models() == {"null": {"f" * 32}}


def test_a_forgotten_worker_registers_again(store: Store, clock: Clock) -> None:
    assert not store.workers.beat("w1", [NULL], 0, 0)
    for _ in range(2):
        store.workers.register("w1", ELSEWHERE, [NULL], "1")
    store.workers.register("w2", ELSEWHERE, [NULL._replace(fingerprint="d" * 32)], "1")
    assert store.workers.known_models() == {"null": {"f" * 32, "d" * 32}}
