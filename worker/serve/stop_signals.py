"""SIGTERM and Ctrl-C of a worker: the first one asks it to hand its rows back, the second ends it at once."""

from __future__ import annotations

import os
import queue
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

EXIT_INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which the two signals are ours. Until `defer` the first one raises KeyboardInterrupt."""

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

    def defer(self) -> None:
        """From now on the first signal only ends `wait`."""
        self._is_deferred = True

    def wait(self, timeout_s: float) -> bool:
        """Waits for the first signal; whether it came."""
        if self._first is not None:
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
        if self._first is not None:
            os._exit(EXIT_INTERRUPTED)  # the engine processes notice by themselves
        self._first = number
        self._received.put(number)
        if not self._is_deferred:
            raise KeyboardInterrupt
