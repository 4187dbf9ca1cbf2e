"""Celery's consumer, with other words for messages that it can't use, and less patience with a broker that is away.

Celery's own would print such a message, and with it somebody's prompts, into the log. It asks a lost broker at
growing intervals, up to 30 s: a submission would wait for so long after the broker's return.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery.worker.consumer import Consumer

MAX_NAME_CHARS = 100
RETRY_S, MAX_RETRY_S = 2.0, 5.0  # between two tries to reach the broker

logger = logging.getLogger(__name__)


class QuietConsumer(Consumer):  # type: ignore[misc]
    """Discards what it can't use, and says so in one line without any content."""

    def ensure_connected(self, conn: Any) -> Any:
        """Tries until the broker answers, however long it is away."""
        longer_s = MAX_RETRY_S - RETRY_S  # kombu adds it to the first interval
        conn.ensure_connection = partial(
            conn.ensure_connection, interval_start=RETRY_S, interval_step=1.0, interval_max=longer_s
        )
        return super().ensure_connected(conn)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """A message that is no Celery task at all."""
        self._discard(message, "it is no Celery task")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """A task that Gristmill does not have."""
        name = str((message.headers or {}).get("task"))[:MAX_NAME_CHARS]
        self._discard(message, f"there is no task {name!r}; the tasks are gristmill.submit and its siblings")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """A task that is not written as Celery writes them, or not in JSON."""
        self._discard(message, f"it can't be read ({type(exc).__name__}); send tasks as JSON")

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """A body that is not what its header says."""
        self._discard(message, f"it can't be decoded ({type(exc).__name__}); send tasks as JSON")

    def _discard(self, message: Any, reason: str) -> None:
        logger.warning("a message was discarded: %s", reason)
        message.reject_log_error(logger, self.connection_errors)
