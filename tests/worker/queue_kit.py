"""What the tests of the queue share: a handlers that only notes what comes, plain Celery clients, waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery

from gristmill.worker.serve.messages import MessageHandlers, StoppingError


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Whether the condition comes true in time, of which a busy machine gets plenty."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class NotingDesk(MessageHandlers):
    """Notes every call as (task, content); `is_busy` makes submissions wait for the stop."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.is_busy = False
        self._stopping = threading.Event()

    def submit(self, fields: Mapping[str, Any], task_id: str) -> Any:
        self.calls.append(("submit", dict(fields)))
        if self.is_busy:
            self._stopping.wait()
            raise StoppingError

    def plan_job(self, job_id: str) -> None:
        self.calls.append(("plan_job", job_id))

    def plan_piece(self, job_id: str, piece_index: int) -> None:
        self.calls.append(("plan_piece", (job_id, piece_index)))

    def run_shards(self, model: str) -> None:
        self.calls.append(("run_shards", model))

    def acknowledge(self, job_id: str) -> None:
        self.calls.append(("acknowledge", job_id))


def plain_client(url: str, **settings: Any) -> Celery:
    """A Celery client as a stranger makes one."""
    client = Celery(broker=url, set_as_current=False)
    client.conf.update(settings)
    return client
