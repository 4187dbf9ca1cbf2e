"""Reconciler with a real store and real files: what is due is done once it is due, whoever lost or broke what."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.jobs.broker import CONTROL_QUEUE, PLAN_PIECE
from gristmill.jobs.errors import OutputUnavailable, StoreUnavailable
from gristmill.jobs.owner import current_owner
from gristmill.jobs.plan.planner import plan_submitted_job
from gristmill.jobs.records import ShardClaim, WorkerModel
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.pieces import PIECES_AGAIN_S
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.serve.reconciler import PLAN_PATIENCE_S, Reconciler, WorkerFigures, WorkerIdentity
from tests.jobs.cases import ELSEWHERE, Clock, claim_next, commit_rows

MODELS = (WorkerModel("null", "f" * 32, "float32", True),)


class Shop:
    """A store, a folder with inputs, and one worker's reconciler whose broker can be taken away."""

    def __init__(self, store: Store, clock: Clock, folder: Path) -> None:
        self.store = store
        self.clock = clock
        self.folder = folder
        self.notified: list[tuple[str, list[Any], str]] = []
        self.has_broker = True
        self.is_stopping = False
        self.num_woken = 0
        self.now = 0.0
        store.workers.register("w1", current_owner(), MODELS, "1.0")
        self.reconciler = Reconciler(
            store,
            WorkerIdentity("w1", current_owner(), [str(folder)]),
            self._notify,
            lambda: self.is_stopping,
            lambda: WorkerFigures(MODELS, 2, 512),
            self._wake,
        )

    def _notify(self, task: str, args: list[Any], queue: str) -> bool:
        if self.has_broker:
            self.notified.append((task, args, queue))
        return self.has_broker

    def _wake(self) -> None:
        self.num_woken += 1

    def turn(self, seconds: float = 1.0) -> None:
        """Lets time pass, for the database too, and does what is due then."""
        self.now += seconds
        self.clock.now += seconds
        self.reconciler.run_once(self.now)

    def submit(self, num_rows: int = 3, name: str = "a", **fields: Any) -> str:
        source = self.folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(num_rows)))
        order = {
            "input": [str(source)],
            "output": str(self.folder / f"{name}-out"),
            "model": "null",
            "prompt": "{{ text }}",
            **fields,
        }
        return self.store.submissions.submit(parse_spec(order)).job.job_id

    def submit_planned(self, num_rows: int = 3, name: str = "a", **fields: Any) -> str:
        job_id = self.submit(num_rows, name, **fields)
        self.turn(2)
        self.turn(PLAN_PATIENCE_S)
        assert self.state(job_id) is JobState.IN_PROGRESS, self.store.jobs.load(job_id).message
        return job_id

    def state(self, job_id: str) -> JobState:
        return self.store.jobs.load(job_id).state

    def commit(self, *rows: int, publish: bool = True) -> ShardClaim:
        """Claims the next shard and commits these of its rows."""
        claim = claim_next(self.store)
        storage = open_storage(self.store.jobs.load(claim.job_id).output)
        assert commit_rows(self.store, storage, claim, *rows, publish=publish, complete=True)
        return claim

    def submit_stopped(self) -> str:
        """A job of two shards that is asked to stop when one of them is committed and not published."""
        job_id = self.submit_planned(4, shard_rows=2)
        self.commit(0, 1, publish=False)
        self.store.ends.request_cancel(job_id)
        return job_id

    def run_all(self, job_id: str) -> None:
        """Runs the only shard of a job that is planned."""
        assert self.commit(*range(self.store.jobs.load(job_id).num_rows)).job_id == job_id


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    clock = Clock()
    with open_store(f"sqlite:///{tmp_path}/jobs.db", clock) as store:
        yield Shop(store, clock, tmp_path)


def test_a_job_that_no_message_brought_is_planned_after_a_while(shop: Shop) -> None:
    job_id = shop.submit()
    shop.turn()
    shop.turn(PLAN_PATIENCE_S - 1)
    assert shop.state(job_id) is JobState.VALIDATING
    shop.turn(2)
    assert shop.state(job_id) is JobState.IN_PROGRESS
    assert shop.num_woken == 1
    assert shop.store.jobs.load(job_id).num_rows == 3


def test_a_job_that_may_not_be_read_here_fails_with_the_reason(shop: Shop) -> None:
    job_id = shop.submit(input=["/etc/passwd.jsonl"])
    shop.turn()
    shop.turn(PLAN_PATIENCE_S)
    job = shop.store.jobs.load(job_id)
    assert job.state is JobState.FAILED
    assert "/etc/passwd.jsonl" in (job.message or "")


def test_pieces_of_a_large_job_are_sent_to_all_and_planned_here_too(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.jobs.plan.planner.is_large", lambda *args, **options: True)
    job_id = shop.submit_planned(50)
    assert shop.notified == [(PLAN_PIECE, [job_id, 0], CONTROL_QUEUE)]
    assert shop.store.jobs.load(job_id).num_rows == 50


def test_pieces_whose_messages_were_lost_are_planned(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.jobs.plan.planner.is_large", lambda *args, **options: True)
    for number in range(10):
        (shop.folder / f"more-{number}.jsonl").write_text('{"text": "row"}\n')
    job_id = shop.submit(1, input=[str(shop.folder / "more-*.jsonl")])
    assert plan_submitted_job(shop.store, job_id, ELSEWHERE, [str(shop.folder)]) == list(range(10))
    shop.has_broker = False
    shop.turn(PIECES_AGAIN_S - 1)
    assert shop.store.pieces.unplanned(job_id) == list(range(10))
    shop.turn(2)
    shop.turn(2)
    assert shop.state(job_id) is JobState.IN_PROGRESS
    assert (shop.store.jobs.load(job_id).num_rows, shop.num_woken) == (10, 1)


def test_a_job_without_open_shards_is_finalized(shop: Shop) -> None:
    job_id = shop.submit_planned()
    shop.turn()
    assert shop.state(job_id) is JobState.IN_PROGRESS
    shop.run_all(job_id)
    shop.turn()
    assert shop.state(job_id) is JobState.COMPLETED
    assert (shop.folder / "a-out" / "_manifest.json").exists()


def test_a_part_that_is_gone_fails_the_job_and_resume_tries_again(shop: Shop) -> None:
    job_id = shop.submit_planned()
    shop.run_all(job_id)
    part = shop.folder / "a-out" / "part-00000.parquet"
    saved = part.read_bytes()
    part.unlink()
    shop.turn()
    job = shop.store.jobs.load(job_id)
    assert job.state is JobState.FAILED
    assert "part-00000.parquet" in (job.message or "")
    part.write_bytes(saved)
    shop.store.ends.resume(job_id)
    shop.turn()
    assert shop.state(job_id) is JobState.COMPLETED


def test_a_fault_of_ours_at_the_end_of_a_job_is_shown_in_the_job(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: Store, storage: Any, job_id: str, owner: Any) -> None:
        store.finalizing.claim(job_id, owner)
        raise AssertionError("2 rows too many")

    job_id = shop.submit_planned()
    shop.run_all(job_id)
    monkeypatch.setattr("gristmill.worker.serve.reconciler.finalize_job", fail)
    shop.turn()
    job = shop.store.jobs.load(job_id)
    assert (job.state, "2 rows too many" in (job.message or "")) == (JobState.FAILED, True)


def test_a_place_that_does_not_answer_holds_up_its_own_job_only_and_not_for_a_lease(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from gristmill.jobs.output.finalize import finalize_job

    is_away = True

    def finalize(store: Store, storage: Any, job_id: str, owner: Any) -> Any:
        if is_away and job_id == first:
            store.finalizing.claim(job_id, owner)
            raise OutputUnavailable("s3://bucket does not answer")
        return finalize_job(store, storage, job_id, owner)

    monkeypatch.setattr("gristmill.worker.serve.reconciler.finalize_job", finalize)
    first, second = shop.submit_planned(name="a"), shop.submit_planned(name="b")
    shop.commit(0, 1, 2)
    shop.commit(0, 1, 2)
    for _ in range(5):
        shop.turn()
    assert (shop.state(first), shop.state(second)) == (JobState.FINALIZING, JobState.COMPLETED)
    assert caplog.text.count("s3://bucket does not answer") == 1
    is_away = False
    shop.turn()
    assert shop.state(first) is JobState.COMPLETED


def test_a_job_past_its_deadline_expires_and_keeps_what_is_done(shop: Shop) -> None:
    job_id = shop.submit_planned(4, shard_rows=2, deadline="10m")
    shop.commit(0, 1)
    shop.turn(500)
    assert shop.state(job_id) is JobState.IN_PROGRESS
    shop.turn(100)
    assert shop.state(job_id) is JobState.EXPIRED
    status = shop.store.jobs.status(job_id)
    assert (status.completed, status.not_run) == (2, 2)


def test_a_part_of_a_stopped_job_that_was_committed_gets_its_name(shop: Shop) -> None:
    job_id = shop.submit_stopped()
    shop.turn()
    assert shop.state(job_id) is JobState.CANCELLED
    assert (shop.folder / "a-out" / "part-00000.parquet").exists()
    assert shop.store.shards.unpublished_parts(job_id) == []


def test_a_part_of_a_stopped_job_whose_folder_is_a_newer_jobs_stays_away(shop: Shop) -> None:
    job_id = shop.submit_stopped()
    shop.clock.now += 1
    newer = shop.submit(4, prompt="other {{ text }}")
    shop.turn()
    assert shop.state(job_id) is JobState.CANCELLED
    assert shop.state(newer) is JobState.VALIDATING
    assert not (shop.folder / "a-out" / "part-00000.parquet").exists()


def test_a_part_that_cannot_be_published_is_tried_until_its_place_answers(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OutputUnavailable("no answer")

    job_id = shop.submit_stopped()
    with monkeypatch.context() as patch:
        patch.setattr("gristmill.worker.serve.reconciler.publish_part", fail)
        shop.turn()
        shop.turn()
    assert len(shop.store.shards.unpublished_parts(job_id)) == 1
    shop.turn()
    assert shop.store.shards.unpublished_parts(job_id) == []


def test_the_end_of_a_job_is_told_until_it_is_acknowledged(shop: Shop) -> None:
    job_id = shop.submit_planned(on_complete="mine.done@reports")
    shop.run_all(job_id)
    shop.has_broker = False
    shop.turn()
    shop.turn(2)
    shop.turn(2)
    assert shop.notified == []
    shop.has_broker = True
    shop.turn(2)
    ((task, (payload,), queue),) = shop.notified
    assert (task, queue) == ("mine.done", "reports")
    assert (payload["job_id"], payload["state"], payload["completed"]) == (job_id, "completed", 3)
    json.dumps(payload)
    shop.turn(10)
    assert len(shop.notified) == 1
    shop.turn(10)
    assert len(shop.notified) == 2
    shop.store.notices.acknowledge(job_id)
    shop.turn(1000)
    assert len(shop.notified) == 2


def test_the_row_of_the_worker_is_refreshed(shop: Shop) -> None:
    shop.turn(500)
    (worker,) = shop.store.workers.load_all()
    assert (worker.seen_at, worker.num_shards, worker.num_rows_in_flight) == (shop.clock.now, 2, 512)


def test_a_worker_that_was_forgotten_registers_again(shop: Shop) -> None:
    shop.clock.now += 1e8
    shop.store.ends.clean(1e6)
    assert shop.store.workers.load_all() == []
    shop.turn()
    (worker,) = shop.store.workers.load_all()
    assert (worker.worker_id, worker.models) == ("w1", MODELS)


def test_a_database_that_is_away_is_said_once_and_its_return_too(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[str]:
        raise StoreUnavailable("no answer")

    caplog.set_level(logging.INFO)
    with monkeypatch.context() as patch:
        patch.setattr(shop.store.ends, "expire", fail, raising=True)
        for _ in range(5):
            shop.turn()
    assert caplog.text.count("expire waits: no answer") == 1
    shop.turn()
    assert caplog.text.count("expire works again") == 1


def test_a_fault_in_one_duty_leaves_the_others_at_work(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[str]:
        raise ValueError("a bug")

    job_id = shop.submit_planned()
    shop.run_all(job_id)
    monkeypatch.setattr(shop.store.ends, "drain_stopped", fail)
    shop.turn()
    shop.turn()
    assert shop.state(job_id) is JobState.COMPLETED
    assert caplog.text.count("ValueError: a bug") == 1


def test_a_worker_that_stops_begins_no_duty(shop: Shop) -> None:
    job_id = shop.submit_planned()
    shop.run_all(job_id)
    shop.is_stopping = True
    shop.turn()
    assert shop.state(job_id) is JobState.IN_PROGRESS


def test_the_threads_do_the_duties_and_end(shop: Shop) -> None:
    job_id = shop.submit_planned()
    shop.run_all(job_id)
    shop.reconciler.start()
    deadline = time.monotonic() + 20
    while shop.state(job_id) is not JobState.COMPLETED and time.monotonic() < deadline:
        time.sleep(0.01)
    shop.reconciler.stop(5.0)
    assert shop.state(job_id) is JobState.COMPLETED
    assert not any(thread.is_alive() for thread in shop.reconciler._threads)
