"""The Celery side of a worker, in a thread of its own: it takes messages and hands them to the MessageHandlers.

Nothing waits for it: the pool works without a broker, and a thread that hangs in a dead socket is left behind at
the end. A consumer that is connected but takes nothing (celery #9054) is started anew.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.app.trace import setup_worker_optimizations
from celery.worker import state

from gristmill.jobs.broker import (
    CONTROL_QUEUE,
    NOTIFY_TIMEOUT_S,
    PLAIN_QUEUE,
    bind_plain_clients,
    build_celery,
    build_queues,
    count_waiting,
    model_queue,
)
from gristmill.worker.serve.messages import MessageHandlers, add_tasks

NUM_THREADS = 2
CHECK_S = 10.0
RESTART_S = 5.0

logger = logging.getLogger(__name__)


def build_app(url: str, handlers: MessageHandlers, models: Sequence[str]) -> Celery:
    """The application of a worker that offers these models; it connects on first use."""
    app = build_celery(url)
    names = [CONTROL_QUEUE, PLAIN_QUEUE, *map(model_queue, models)]
    app.conf.update(
        task_queues=build_queues(names), worker_consumer="gristmill.worker.serve.consumer:QuietConsumer"
    )
    add_tasks(app, handlers)
    return app


class DeafnessCheck:
    """Whether messages wait while this process takes none; one look at a time."""

    def __init__(self) -> None:
        self._num_taken: int | None = None  # at the last look that found messages waiting

    def look(self, num_waiting: int, num_taken: int, num_active: int) -> bool:
        """True at the second look in a row that finds messages waiting and nothing done about them."""
        if not num_waiting or num_active:
            self._num_taken = None
            return False
        is_deaf = self._num_taken == num_taken
        self._num_taken = None if is_deaf else num_taken
        return is_deaf


class CeleryHost:
    """Runs Celery until stop() is called or somebody shuts it down by remote control."""

    def __init__(self, url: str, app: Celery) -> None:
        self._url = url
        self._app = app
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="celery", daemon=True)
        self._watch = threading.Thread(target=self._check_always, name="celery-watch", daemon=True)
        self._is_running = False
        self.was_shut_down = False
        self.is_ready = threading.Event()

    def start(self) -> None:
        """Begins to consume as soon as the broker answers."""
        state.should_stop = state.should_terminate = None
        self._thread.start()
        self._watch.start()

    def stop(self) -> None:
        """Asks Celery to end; returns at once."""
        self._stopping.set()
        state.should_stop = 0

    def join(self, timeout_s: float) -> bool:
        """Waits for the end; False when Celery hangs in its broker's socket or a task goes on."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            exit_code = self._run_once()
            if self._stopping.is_set():
                return
            if exit_code == 0 and state.should_stop is None:
                self.was_shut_down = True
                return
            state.should_stop = None
            if exit_code != 0:
                logger.error("Celery ended; it starts again in %.0f s", RESTART_S)
                self._stopping.wait(RESTART_S)

    def _run_once(self) -> int:
        """Consumes until Celery ends; its exit code."""
        try:
            worker = self._build_worker()
            self._is_running = True
            worker.start()
        except Exception as error:  # the border of a thread that must go on
            logger.error("Celery failed: %s", type(error).__name__)
            return 1
        finally:
            self._is_running = False
        return int(worker.exitcode or 0)

    def _build_worker(self) -> Any:
        state.reset_state()
        hostname = f"gristmill-{os.getpid()}@{socket.gethostname()}"
        setup_worker_optimizations(self._app, hostname)  # makes the pool's threads look for tasks in this app
        return self._app.WorkController(
            hostname=hostname,
            pool_cls="threads",
            concurrency=NUM_THREADS,
            without_gossip=True,
            without_mingle=True,
            loglevel="WARNING",
            ready_callback=self._on_ready,
        )

    def _on_ready(self, _consumer: Any) -> None:
        self.is_ready.set()
        logger.info("takes messages from the broker")

    def _check_always(self) -> None:
        celery, check, is_answering = build_celery(self._url, NOTIFY_TIMEOUT_S), DeafnessCheck(), True
        while not self._stopping.is_set():
            is_answering = self._check(celery, check, is_answering)
            self._stopping.wait(CHECK_S)

    def _check(self, celery: Celery, check: DeafnessCheck, was_answering: bool) -> bool:
        """One look at the broker; whether it answered."""
        try:
            bind_plain_clients(celery)
            num_waiting = count_waiting(celery)
        except (
            Exception
        ) as error:  # the border of a thread that must go on; kombu lets through any client's errors
            if was_answering:
                reason = " ".join(str(error).split())
                logger.warning("the broker does not answer (%s); the work goes on, it is asked again", reason)
            return False
        if not was_answering:
            logger.info("the broker answers again")
        is_deaf = check.look(num_waiting, state.all_total_count[0], len(state.active_requests))
        if is_deaf and self._is_running:
            logger.warning("Celery is connected but takes no messages; it starts again")
            state.should_stop = 0
        return True
