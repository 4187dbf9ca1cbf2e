"""Tells the worker of the steps, on a thread of its own: texts are decoded, encoded and sent while the next step runs.

Reports go out in the order of the steps. It bounds what waits, so a worker that doesn't read stops the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Queue
from typing import Generic, NamedTuple, TypeVar

from gristmill.engine.process import protocol
from gristmill.engine.request import Completion, EngineCounters

MAX_REPORTS = 16  # that wait, of at most max_num_seqs rows each

F = TypeVar("F")  # what an engine's steps return of a finished request


class Report(NamedTuple, Generic[F]):
    """The requests that a step finished; the counts include them."""

    counters: EngineCounters
    finished: list[F]


def encode_report(counters: EngineCounters, completions: Iterable[Completion]) -> bytes:
    """Progress goes first: who has read a completion knows the counts that include it."""
    return b"".join([protocol.encode_progress(counters), *protocol.encode_completions(completions)])


class ReportWriter(Generic[F]):
    """`put` and `close` belong to the thread that steps; `complete` and `send` are called by the writer's."""

    def __init__(self, complete: Callable[[F], Completion], send: Callable[[bytes], None]) -> None:
        self._complete = complete
        self._send = send
        self._reports: Queue[Report[F] | None] = Queue(MAX_REPORTS)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, report: Report[F]) -> None:
        """Queues a report; waits while many are queued. Raises what went wrong with an earlier one."""
        if self._error is not None:
            raise self._error
        self._reports.put(report)

    def close(self) -> None:
        """Returns when everything that was put is sent; what went wrong with it is not raised any more."""
        self._reports.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_sending = True
        while (report := self._reports.get()) is not None:  # also after an error: put must not wait for ever
            if is_sending:
                completions = self._complete_all(report.finished)
                try:
                    self._send(encode_report(report.counters, completions))
                except Exception as error:  # the thread's border: put raises it
                    self._error = self._error or error
                    is_sending = False

    def _complete_all(self, finished: list[F]) -> list[Completion]:
        """Those that can be completed: one that can't ends the engine, but the others are not computed again."""
        completions = []
        for item in finished:
            try:
                completions.append(self._complete(item))
            except Exception as error:  # the thread's border: put raises it
                self._error = self._error or error
        return completions
