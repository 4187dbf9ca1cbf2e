"""SIGTERM and Ctrl-C of a worker or a run: the first one asks it to hand its rows back, the second ends it at once.

While nothing is at stake (planning, loading the model) the first one raises KeyboardInterrupt; while rows run it is
only noted, so that what is finished can be committed.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
    """A context in which the two signals are ours. Off the main thread only `request_stop` asks for the end."""

    def __init__(self) -> None:
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put may be called in a handler
        self._first: int | None = None
        self._is_deferred = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def request_stop(self, number: int = signal.SIGINT) -> None:
        """The same as a first signal that is deferred; from any thread."""
        self._first = number
        self._received.put(number)

    def should_stop(self) -> bool:
        """Whether a signal came."""
        return self._first is not None

    def defer(self) -> None:
        """From now on the first signal is only noted."""
        self._is_deferred = True

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A stretch in which the first signal is only noted. One that came before raises here."""
        self._is_deferred = True
        try:
            if self.should_stop():
                raise KeyboardInterrupt
            yield
        finally:
            self._is_deferred = False

    def wait(self, timeout_s: float) -> bool:
        """Waits for the first signal; whether it came."""
        if self.should_stop():
            return True
        try:
            self._received.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    @property
    def exit_code(self) -> int:
        """0 after SIGTERM, which is how a worker is meant to end; 130 after Ctrl-C."""
        return EXIT_INTERRUPTED if self._first == signal.SIGINT else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.should_stop():
            if sys.stderr is not None and sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)  # the engine processes notice by themselves
        self.request_stop(number)
        if not self._is_deferred:
            raise KeyboardInterrupt
