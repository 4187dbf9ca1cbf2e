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
from gristmill.jobs.records import WorkerModel
from gristmill.jobs.states import JobState, Runner
from gristmill.jobs.store.store import Store, open_store
from gristmill.worker.serve import messages
from gristmill.worker.serve.messages import MessageHandlers, StoppingError


class Notifications:
    """Notes the notifies; `is_down` lets them fail."""

    def __init__(self) -> None:
        self.notified: list[tuple[str, list[Any], str]] = []
        self.woken: list[str | None] = []
        self.is_down = False

    def notify(self, task: str, args: Sequence[Any], queue: str) -> bool:
        self.notified.append((task, list(args), queue))
        return not self.is_down


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db") as opened:
        yield opened


@pytest.fixture
def notifiers() -> Notifications:
    return Notifications()


@pytest.fixture
def handlers(store: Store, notifiers: Notifications, tmp_path: Path) -> MessageHandlers:
    return MessageHandlers(store, current_owner(), [str(tmp_path)], notifiers.notify, notifiers.woken.append)


@pytest.fixture
def order(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(40)))
    return {
        "input": [str(tmp_path / "in.jsonl")],
        "output": str(tmp_path / "out"),
        "model": "m",
        "prompt": "{{ text }}",
        "shard_rows": 10,
    }


def test_a_submission_becomes_a_job_and_is_planned_by_whoever_hears_the_notifier(
    handlers: MessageHandlers, notifiers: Notifications, order: dict[str, Any]
) -> None:
    job = handlers.submit(order, "task-1")
    assert (job.state, job.runner) == (JobState.VALIDATING, Runner.WORKERS)
    assert (job.model, job.idempotency_key) == ("m", "task-1")
    assert notifiers.notified == [(PLAN_JOB, [job.job_id], CONTROL_QUEUE)]


def test_the_same_message_again_is_the_same_job(
    handlers: MessageHandlers, notifiers: Notifications, store: Store, order: dict[str, Any]
) -> None:
    first = handlers.submit(order, "task-1")
    assert handlers.submit(order, "task-1").job_id == first.job_id
    order["idempotency_key"] = "nightly"
    keyed = handlers.submit(order, "task-2")
    assert handlers.submit(order, "task-3").job_id == keyed.job_id != first.job_id
    assert len(store.jobs.newest()) == 2
    assert len(notifiers.notified) == 2


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
    handlers: MessageHandlers,
    notifiers: Notifications,
    store: Store,
    order: dict[str, Any],
    change: dict[str, Any],
    said: str,
) -> None:
    job = handlers.submit(order | change, "task-1")
    assert (job.state, job.runner) == (JobState.FAILED, Runner.WORKERS)
    assert job.message and said in job.message
    assert notifiers.notified == []
    assert handlers.submit(order | change, "task-1").job_id == job.job_id
    assert len(store.jobs.newest()) == 1


def test_a_submission_waits_for_the_database(
    handlers: MessageHandlers, store: Store, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "RETRY_S", 0.0)
    failures = [StoreUnavailable("restarted")] * 3
    submit_job = store.submissions.submit

    def submit_later(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return submit_job(*args)

    monkeypatch.setattr(store.submissions, "submit", submit_later)
    assert handlers.submit(order, "task-1").state is JobState.VALIDATING


def test_a_submission_that_waits_is_given_back_when_the_worker_stops(
    handlers: MessageHandlers, store: Store, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = threading.Event()

    def refuse(*_: Any) -> Any:
        is_asked.set()
        raise StoreUnavailable("down")

    monkeypatch.setattr(store.submissions, "submit", refuse)
    threading.Thread(target=lambda: is_asked.wait(10) and handlers.stop()).start()
    with pytest.raises(StoppingError):
        handlers.submit(order, "task-1")


def test_planning_starts_the_job_and_wakes_the_pool(
    handlers: MessageHandlers, notifiers: Notifications, store: Store, order: dict[str, Any]
) -> None:
    job = handlers.submit(order, "task-1")
    notifiers.notified.clear()
    handlers.plan_job(job.job_id)
    planned = store.jobs.load(job.job_id)
    assert (planned.state, planned.num_rows) == (JobState.IN_PROGRESS, 40)
    assert notifiers.woken == ["m"]
    assert notifiers.notified == []  # no worker offers the model: such notifiers would pile up


def test_workers_that_offer_the_model_are_notified_once_a_shard_at_most(
    handlers: MessageHandlers, notifiers: Notifications, store: Store, order: dict[str, Any]
) -> None:
    model = WorkerModel("m", "f" * 32, "float32", False)
    store.workers.register("worker_1", current_owner(), [model], "0.1.0")
    job = handlers.submit(order, "task-1")
    notifiers.notified.clear()
    handlers.plan_job(job.job_id)
    num_shards = store.jobs.load(job.job_id).num_shards
    assert 1 < num_shards
    num_told = min(num_shards - 1, messages.MAX_NOTIFICATIONS)
    assert notifiers.notified == [(RUN_SHARDS, ["m"], "gristmill.model.m")] * num_told


def test_a_stale_hint_does_nothing(
    handlers: MessageHandlers, notifiers: Notifications, store: Store, order: dict[str, Any]
) -> None:
    job = handlers.submit(order, "task-1")
    handlers.plan_job(job.job_id)
    notifiers.notified.clear()
    notifiers.woken.clear()
    for _ in range(10):
        handlers.plan_job(job.job_id)
        handlers.plan_piece(job.job_id, 0)
    assert (notifiers.notified, notifiers.woken) == ([], [])


def test_an_unknown_job_is_an_error_of_one_line(handlers: MessageHandlers) -> None:
    with pytest.raises(StoreError, match="job_nowhere"):
        handlers.plan_job("job_nowhere")


def test_a_place_outside_the_roots_is_refused(
    handlers: MessageHandlers, store: Store, order: dict[str, Any]
) -> None:
    job = handlers.submit(order | {"input": ["/etc/passwd"], "input_format": "jsonl"}, "task-1")
    handlers.plan_job(job.job_id)
    planned = store.jobs.load(job.job_id)
    assert planned.state is JobState.FAILED
    assert "/etc/passwd" in (planned.message or "")


def test_pieces_are_notified_until_the_broker_fails(
    handlers: MessageHandlers,
    notifiers: Notifications,
    order: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "plan_submitted_job", lambda *_: [0, 1, 2])
    job = handlers.submit(order, "task-1")
    notifiers.notified.clear()
    handlers.plan_job(job.job_id)
    assert notifiers.notified == [(PLAN_PIECE, [job.job_id, index], CONTROL_QUEUE) for index in range(3)]
    notifiers.notified.clear()
    notifiers.is_down = True
    handlers.plan_job(job.job_id)
    assert len(notifiers.notified) == 1


def test_a_notification_wakes_the_pool(handlers: MessageHandlers, notifiers: Notifications) -> None:
    handlers.run_shards("m")
    assert notifiers.woken == ["m"]
