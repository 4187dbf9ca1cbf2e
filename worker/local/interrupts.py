"""Ctrl-C and SIGTERM of a local run: first a wish to stop, the second time the end.

While nothing is at stake (planning, loading the model) the first one raises KeyboardInterrupt; while rows run
it only sets a flag, so that the runner can commit what is finished.
"""

from __future__ import annotations

import os
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


class Interrupts:
    """A context in which the two signals are ours. Off the main thread it has only the flag."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._is_deferred = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._earlier = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def request_stop(self) -> None:
        """The same as a first Ctrl-C that is deferred; from any thread."""
        self._stop.set()

    def should_stop(self) -> bool:
        return self._stop.is_set()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A stretch in which the first signal only sets the flag. One that came before raises here."""
        self._is_deferred = True
        try:
            if self._stop.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            if sys.stderr is not None and sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
                sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)  # the engine process notices by itself
        self._stop.set()
        if not self._is_deferred:
            raise KeyboardInterrupt
