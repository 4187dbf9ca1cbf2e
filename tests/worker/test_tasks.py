"""The handlers behind the tasks, on a real store: submissions, planning, wake-ups, messages that mean nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.jobs.broker import CONTROL_QUEUE, PLAN_JOB, PLAN_PIECE, RUN_SHARDS
from gristmill.jobs.errors import StoreError, StoreUnavailable
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import JobRecord, WorkerModel
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.serve import messages
from gristmill.worker.serve.messages import MessageHandlers, StoppingError


class Desk:
    """The handlers of one worker with a store and an order; it notes the notifications, which `is_down` lets fail."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.notified: list[tuple[str, list[Any], str]] = []
        self.woken: list[str | None] = []
        self.is_down = False
        self.handlers = MessageHandlers(
            store, current_owner(), [str(folder)], self._notify, self.woken.append
        )
        source = folder / "in.jsonl"
        source.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(40)))
        self.order: dict[str, Any] = {
            "input": [str(source)],
            "output": str(folder / "out"),
            "model": "m",
            "prompt": "{{ text }}",
            "shard_rows": 10,
        }

    def _notify(self, task: str, args: Sequence[Any], queue: str) -> bool:
        self.notified.append((task, list(args), queue))
        return not self.is_down

    def submit(self, key: str = "task-1", **change: Any) -> JobRecord:
        return self.handlers.submit(self.order | change, key)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db") as store:
        yield Desk(store, tmp_path)


def test_a_submission_becomes_a_job_and_is_planned_by_whoever_hears_the_notifier(desk: Desk) -> None:
    job = desk.submit()
    assert (job.state, job.runner) == (JobState.VALIDATING, Runner.WORKERS)
    assert (job.model, job.idempotency_key) == ("m", "task-1")
    assert desk.notified == [(PLAN_JOB, [job.job_id], CONTROL_QUEUE)]


def test_the_same_message_again_is_the_same_job(desk: Desk) -> None:
    first = desk.submit()
    assert desk.submit().job_id == first.job_id
    keyed = desk.submit("task-2", idempotency_key="nightly")
    assert desk.submit("task-3", idempotency_key="nightly").job_id == keyed.job_id != first.job_id
    assert len(desk.store.jobs.newest()) == 2
    assert len(desk.notified) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": None}, "model"),
        ({"prompt": 7}, "prompt"),
        ({"promt": "x"}, "promt is not an option"),
        ({"deadline": "soon"}, "deadline"),
        ({"idempotency_key": 7}, "idempotency_key"),
        ({"idempotency_key": "k" * 300}, "idempotency_key"),
        ({"output": "\0"}, ""),
    ],
)
def test_a_wrong_submission_is_a_failed_job_that_says_why(
    desk: Desk, change: dict[str, Any], said: str
) -> None:
    job = desk.submit(**change)
    assert (job.state, job.runner) == (JobState.FAILED, Runner.WORKERS)
    assert job.message and said in job.message
    assert desk.notified == []
    assert desk.submit(**change).job_id == job.job_id
    assert len(desk.store.jobs.newest()) == 1


def test_a_submission_waits_for_the_database(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "RETRY_S", 0.0)
    failures = [StoreUnavailable("restarted")] * 3
    submit_job = desk.store.submissions.submit

    def submit_later(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return submit_job(*args)

    monkeypatch.setattr(desk.store.submissions, "submit", submit_later)
    assert desk.submit().state is JobState.VALIDATING


def test_a_submission_that_waits_is_given_back_when_the_worker_stops(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = threading.Event()

    def refuse(*_: Any) -> Any:
        is_asked.set()
        raise StoreUnavailable("down")

    monkeypatch.setattr(desk.store.submissions, "submit", refuse)
    threading.Thread(target=lambda: is_asked.wait(10) and desk.handlers.stop()).start()
    with pytest.raises(StoppingError):
        desk.submit()


def test_planning_starts_the_job_and_wakes_the_pool(desk: Desk) -> None:
    job = desk.submit()
    desk.notified.clear()
    desk.handlers.plan_job(job.job_id)
    planned = desk.store.jobs.load(job.job_id)
    assert (planned.state, planned.num_rows) == (JobState.IN_PROGRESS, 40)
    assert desk.woken == ["m"]
    assert desk.notified == []  # no worker offers the model: such notifiers would pile up


def test_workers_that_offer_the_model_are_notified_once_a_shard_at_most(desk: Desk) -> None:
    model = WorkerModel("m", "f" * 32, "float32", False)
    desk.store.workers.register("worker_1", current_owner(), [model], "0.1.0")
    job = desk.submit()
    desk.notified.clear()
    desk.handlers.plan_job(job.job_id)
    num_shards = desk.store.jobs.load(job.job_id).num_shards
    assert 1 < num_shards
    num_told = min(num_shards - 1, messages.MAX_NOTIFICATIONS)
    assert desk.notified == [(RUN_SHARDS, ["m"], "gristmill.model.m")] * num_told


def test_a_stale_hint_does_nothing(desk: Desk) -> None:
    job = desk.submit()
    desk.handlers.plan_job(job.job_id)
    desk.notified.clear()
    desk.woken.clear()
    for _ in range(10):
        desk.handlers.plan_job(job.job_id)
        desk.handlers.plan_piece(job.job_id, 0)
    assert (desk.notified, desk.woken) == ([], [])


def test_an_unknown_job_is_an_error_of_one_line(desk: Desk) -> None:
    with pytest.raises(StoreError, match="job_nowhere"):
        desk.handlers.plan_job("job_nowhere")


def test_a_place_outside_the_roots_is_refused(desk: Desk) -> None:
    job = desk.submit(input=["/etc/passwd"], input_format="jsonl")
    desk.handlers.plan_job(job.job_id)
    planned = desk.store.jobs.load(job.job_id)
    assert planned.state is JobState.FAILED
    assert "/etc/passwd" in (planned.message or "")


def test_pieces_are_notified_until_the_broker_fails(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "plan_submitted_job", lambda *_: [0, 1, 2])
    job = desk.submit()
    desk.notified.clear()
    desk.handlers.plan_job(job.job_id)
    assert desk.notified == [(PLAN_PIECE, [job.job_id, index], CONTROL_QUEUE) for index in range(3)]
    desk.notified.clear()
    desk.is_down = True
    desk.handlers.plan_job(job.job_id)
    assert len(desk.notified) == 1


def test_a_notification_wakes_the_pool(desk: Desk) -> None:
    desk.handlers.run_shards("m")
    assert desk.woken == ["m"]
