"""The worker's side of an engine process: requests out, completions in, and what was in flight when it dies.

Sending and receiving happen in the child's own thread (worker/engine/child.py); only poll, kill and close
wait for the engine, and those for a bounded time. Restarting and re-adding are the caller's decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from queue import Empty

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineDied, EngineError, ModelRefused
from gristmill.engine.process import protocol
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request
from gristmill.worker.engine.child import EngineChild

_CLOSE_S = 0.8  # what a child may take to stop by itself
_STOP_CHECK_S = 0.05


class EngineClient:
    """One engine, whichever process runs it at the moment. One thread calls it; kill() may come from any."""

    def __init__(self, model: str, options: EngineOptions) -> None:
        self._model = model
        self._options = options
        self._child: EngineChild | None = None
        self._ended = False  # the present child is dead, and all it sent has been read
        self._before = EngineCounters()  # the counts of the children before the present one, negated
        self.in_flight: dict[int, Request] = {}  # in order of adding; kept after EngineDied, until start()

    def start(self) -> None:
        """Spawns an engine process (ending the one before) and has it load the model; clears in_flight.

        Returns at once; what goes wrong shows in wait_loaded() and poll().
        """
        self.close()
        self.in_flight = {}
        self._child = EngineChild(protocol.encode_load(self._model, self._options))

    def wait_loaded(self, timeout_s: float, stop: Callable[[], bool]) -> EngineInfo:
        """Waits for the model; raises ModelRefused, or EngineDied also when stop() is true or time is up."""
        child = self._child
        if child is None:
            raise self._death()
        deadline = time.monotonic() + timeout_s
        while not child.settled.wait(_STOP_CHECK_S):
            if stop():
                reason = "stopped while the engine was loading the model"
            elif time.monotonic() >= deadline:
                reason = f"the model did not load within {timeout_s:g} s: {self._model}"
            else:
                continue
            child.kill()
            raise EngineDied(reason, child.exit_code, tuple(self.in_flight))
        if child.info is None:
            raise self._death()
        return child.info

    def add(self, requests: list[Request]) -> None:
        """Sends the requests, also before the model is loaded; a dead engine shows at the next poll."""
        assert self._child is not None, "start() comes before add()"
        self.in_flight.update((request.request_id, request) for request in requests)
        for frame in protocol.encode_add(requests):
            self._child.send(frame)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forgets these requests now: completions of them that are on their way are dropped."""
        ids = [i for i in request_ids if self.in_flight.pop(i, None) is not None]
        if ids and self._child is not None:
            self._child.send(protocol.encode_message("cancel", ids))

    def poll(self, timeout_s: float) -> list[Completion]:
        """All completions that have come, else the first within timeout_s; EngineDied after the last one.

        ModelRefused takes its place when the child refused the model. Both are raised again until start().
        """
        deadline = time.monotonic() + timeout_s
        completions: list[Completion] = []
        while not completions:
            if self._child is None or self._ended:
                raise self._death()
            inbox = self._child.inbox
            wait_s = deadline - time.monotonic()
            try:
                payload = inbox.get(timeout=wait_s) if wait_s > 0 else inbox.get_nowait()
                while payload is not None:
                    completions += self._take(payload)
                    payload = inbox.get_nowait()
                self._ended = True
            except Empty:
                if wait_s <= 0:
                    break
        return completions

    def _take(self, payload: object) -> list[Completion]:
        """The completions of one message, without those that were cancelled meanwhile."""
        completions = protocol.decode_completions(payload)
        take = self.in_flight.pop
        return [completion for completion in completions if take(completion.request_id, None) is not None]

    def _death(self) -> EngineError:
        child, in_flight = self._child, tuple(self.in_flight)
        if child is None:
            return EngineDied("no engine process is running", None, in_flight)
        if child.fatal_code == "refused":
            return ModelRefused(child.failure)
        return EngineDied(child.failure or "the engine process ended", child.exit_code, in_flight)

    @property
    def counters(self) -> EngineCounters:
        """The last progress, summed over all children; its state fields are the present child's."""
        present = self._child.counters if self._child is not None else EngineCounters()
        return present.minus(self._before)

    @property
    def last_progress_s(self) -> float:
        """time.monotonic() of the present child's last message, or of its start."""
        return self._child.last_message_s if self._child is not None else 0.0

    @property
    def info(self) -> EngineInfo | None:
        """What the present child says of itself, once it is loaded."""
        return self._child.info if self._child is not None else None

    @property
    def pid(self) -> int | None:
        """The process that runs the engine; None when there is none."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else None

    def kill(self) -> None:
        """Kills the engine process and reaps it; poll() tells of it as of any death."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Ends the engine process within about a second. Nothing happens when none runs."""
        if self._child is not None:
            self._child.stop(_CLOSE_S)
            self._before = EngineCounters().minus(self.counters)
            self._child, self._ended = None, False
