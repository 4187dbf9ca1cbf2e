"""The message broker (Redis): its settings, its queues, and notifications that may be lost.

Celery carries submissions and hints; the database decides. So a broker that is down is never an error of the caller.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.store.database import safe_url

if TYPE_CHECKING:
    from celery import Celery

CONTROL_QUEUE = "gristmill"
PLAIN_QUEUE = "celery"  # where a Celery client sends that names no queue
SUBMIT, PLAN_JOB, PLAN_PIECE = "gristmill.submit", "gristmill.plan_job", "gristmill.plan_piece"
RUN_SHARDS, ACKNOWLEDGE = "gristmill.run_shards", "gristmill.acknowledge"
PRIORITIES = {"high": 0, "normal": 3, "low": 6}  # of messages; 0 overtakes

CONSUME_TIMEOUT_S = 15.0
NOTIFY_TIMEOUT_S = 1.0  # of one reply; kombu and redis-py ask up to three times
PAUSE_S = 5.0
_SCHEMES = ("redis://", "rediss://")
Notify = Callable[[str, Sequence[Any], str], bool]  # task, arguments, queue: False when the broker is away

logger = logging.getLogger(__name__)


def broker_url(flag: str | None) -> str:
    """The broker to use: the flag, else GRISTMILL_BROKER_URL. Raises RefusedError without a usable one."""
    given = flag or os.environ.get("GRISTMILL_BROKER_URL")
    if not given:
        raise RefusedError(
            "no broker: give --broker-url or set GRISTMILL_BROKER_URL, for example redis://localhost:6379/0"
        )
    if not given.startswith(_SCHEMES):
        raise RefusedError(f"the broker URL {safe_url(given)} is not of Redis: write redis://HOST:6379/0")
    return given


def has_broker(flag: str | None) -> bool:
    """Whether a broker is configured at all; workers find jobs in the database also without a notification."""
    return bool(flag or os.environ.get("GRISTMILL_BROKER_URL"))


def model_queue(name: str) -> str:
    """The queue of the workers that offer this model."""
    return f"gristmill.model.{name}"


def build_celery(url: str, timeout_s: float = CONSUME_TIMEOUT_S) -> Celery:
    """A Celery application with the settings that were measured to survive; it connects on first use."""
    from celery import Celery

    app = Celery("gristmill", set_as_current=False, fixups=[])
    app.conf.update(
        broker_url=url,
        broker_read_url=url,  # these two go before CELERY_BROKER_URL, which may belong to another application
        broker_write_url=url,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": 86_400,
            "socket_timeout": timeout_s,
            "socket_connect_timeout": min(5.0, timeout_s),
            "socket_keepalive": True,
            "health_check_interval": 10,
            "priority_steps": [0, 3, 6, 9],
            "queue_order_strategy": "priority",
        },
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_acks_late=False,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        task_queues=build_queues([CONTROL_QUEUE, PLAIN_QUEUE]),
        task_default_queue=CONTROL_QUEUE,
        task_default_exchange="",
        task_default_routing_key=CONTROL_QUEUE,
    )
    return app


def build_queues(names: Sequence[str]) -> tuple[Any, ...]:
    """Queues on the anonymous exchange, which needs no bindings: a broker that was emptied has lost all others."""
    return tuple(_build_queue(name, exchange="") for name in names)


def bind_plain_clients(celery: Celery) -> None:
    """Declares the bindings by which a plain Celery client reaches our queues.

    Such a client sends through exchanges named like the queues, and declares them only once: after the broker
    was emptied its messages would vanish. Raises what kombu raises when the broker does not answer.
    """
    with celery.connection_for_write() as connection, connection.channel() as channel:
        for name in (CONTROL_QUEUE, PLAIN_QUEUE):
            _build_queue(name, exchange=name)(channel).declare()


def count_waiting(celery: Celery) -> int:
    """Messages for any worker that no worker has taken. Raises what kombu raises without an answer."""
    with celery.connection_for_write() as connection, connection.channel() as channel:
        return sum(
            queue(channel).queue_declare(passive=False).message_count
            for queue in build_queues([CONTROL_QUEUE, PLAIN_QUEUE])
        )


def notify(celery: Celery, task: str, args: Sequence[Any], queue: str, priority: str = "normal") -> bool:
    """Sends one message; False, and one line in the log, when the broker does not answer within about 3 s.

    `celery` should come from build_celery(url, NOTIFY_TIMEOUT_S).
    """
    from kombu.exceptions import KombuError

    (target,) = build_queues([queue])
    try:
        celery.send_task(
            task,
            list(args),
            queue=target,
            priority=PRIORITIES[priority],
            retry=True,  # once: the connection may have been cut since it was last used
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0},
        )
    except (KombuError, OSError) as error:
        reason = " ".join(str(error).split())
        logger.warning("the broker does not answer (%s); jobs go on by the database alone", reason)
        return False
    return True


def _build_queue(name: str, exchange: str) -> Any:
    kombu: Any = import_module("kombu")  # most of its functions have no types
    return kombu.Queue(name, kombu.Exchange(exchange, type="direct"), routing_key=name)


class Notifier:
    """The notifications of one process: thread-safe, and silent for a while after the broker did not answer."""

    def __init__(
        self, url: str, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._pause_s = pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._celery: Celery | None = None
        self._silent_until = float("-inf")

    def notify(self, task: str, args: Sequence[Any], queue: str, priority: str = "normal") -> bool:
        """Sends one message; False when it did not reach the broker."""
        if self._clock() < self._silent_until:
            return False
        with self._lock:
            if self._celery is None:
                self._celery = build_celery(self._url, NOTIFY_TIMEOUT_S)
        if notify(self._celery, task, args, queue, priority):
            return True
        self._silent_until = self._clock() + self._pause_s
        return False

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            if self._celery is not None:
                self._celery.close()
                self._celery = None
