"""A database or object store that does not answer: nothing is asked of it for a while, and one note says so."""

from __future__ import annotations

from gristmill.jobs.errors import Unavailable
from gristmill.worker.show.progress import Display

RETRY_S = 2.0


class ServiceWait:
    """Whether services may be asked; used by the runner's loop."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._until_s = 0.0
        self._is_noted = False

    def is_over(self, now: float) -> bool:
        return now >= self._until_s

    def begin(self, error: Unavailable, now: float) -> None:
        """A service did not answer."""
        self._until_s = now + RETRY_S
        if not self._is_noted:
            self._display.note(f"{error}; waiting for it")
        self._is_noted = True

    def end(self) -> None:
        """It answers."""
        self._is_noted = False
