"""Keeps the engine process supplied with rows, within a credit window, over its deaths.

After a death only the rows that were in flight go in again, and nothing else until they are through: so a row
that kills the engine is soon alone with few others, and three deaths without a finished row end its shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.request import Completion, EngineCounters, Request
from worker.engine_client import EngineClient

MAX_DEATHS = 3  # without a finished row in between
ENGINE_TIMEOUT_S = 120.0  # without a word from the engine it counts as hung
LOAD_TIMEOUT_S = 900.0
MAX_TOKENS_IN_FLIGHT = 8_000_000  # of prompts: memory stays flat where rows are long
_TOP_UP_PARTS = 8  # top up by at least this part of the window: few large messages


class EngineFeed:
    """The rows that wait for the engine and those in it. Used by the runner's loop only."""

    def __init__(self, engine: EngineClient, max_rows_in_flight: int) -> None:
        self._engine = engine
        self._max_rows = max_rows_in_flight
        self._ready: deque[Request] = deque()
        self._num_tokens: dict[int, int] = {}  # of the prompts that are ready or in flight
        self._sum_tokens = 0
        self._suspects: set[int] = set()
        self._num_deaths = 0
        self._was_silent = False

    @property
    def max_rows_in_flight(self) -> int:
        return self._max_rows

    @property
    def num_in_flight(self) -> int:
        return len(self._engine.in_flight)

    @property
    def wants_rows(self) -> bool:
        """Whether the next batch should be taken: the window has room, in rows and in tokens."""
        return len(self._num_tokens) < self._max_rows and self._sum_tokens < MAX_TOKENS_IN_FLIGHT

    @property
    def counters(self) -> EngineCounters:
        return self._engine.counters

    def push(self, requests: Sequence[Request]) -> None:
        """Rows that are ready for the engine."""
        self._ready.extend(requests)
        num_tokens = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self._num_tokens.update(num_tokens)
        self._sum_tokens += sum(num_tokens.values())

    def top_up(self) -> None:
        """Sends ready rows as far as the window allows."""
        room = self._max_rows - len(self._engine.in_flight)
        num_added = min(room, len(self._ready))
        if self._suspects or num_added <= 0:
            return
        if num_added < len(self._ready) and room < self._max_rows // _TOP_UP_PARTS:
            return
        self._engine.add([self._ready.popleft() for _ in range(num_added)])

    def poll(self, timeout_s: float) -> list[Completion]:
        """What the engine finished; raises EngineDied and ModelRefused as the client does."""
        completions = self._engine.poll(timeout_s)
        if completions:
            self._num_deaths = 0
            request_ids = [completion.request_id for completion in completions]
            self._forget_tokens(request_ids)
            if self._suspects:
                self._suspects.difference_update(request_ids)
        return completions

    def restart(self) -> bool:
        """Starts a dead engine again with the rows that were in flight. False: it died too often."""
        self._num_deaths += 1
        if self._num_deaths >= MAX_DEATHS:
            return False
        self._start(list(self._engine.in_flight.values()))
        return True

    def restart_without(self, request_ids: Iterable[int]) -> None:
        """Gives these rows up and starts the engine with the others."""
        self._num_deaths = 0
        given_up = set(request_ids)
        self._forget_tokens(given_up)
        self._ready = deque(r for r in self._ready if r.request_id not in given_up)
        self._start([r for r in self._engine.in_flight.values() if r.request_id not in given_up])

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forgets rows, whether they are ready or in flight."""
        forgotten = set(request_ids)
        self._forget_tokens(forgotten)
        self._ready = deque(r for r in self._ready if r.request_id not in forgotten)
        self._suspects -= forgotten
        self._engine.cancel([i for i in forgotten if i in self._engine.in_flight])

    def is_reporting(self, now: float) -> bool:
        """Whether the engine said something lately; loading may take longer."""
        limit_s = ENGINE_TIMEOUT_S if self._engine.info is not None else LOAD_TIMEOUT_S
        return now - self._engine.last_progress_s < limit_s

    def kill_if_hung(self, now: float) -> bool:
        """Kills an engine that was silent too long at two calls in a row (once may be our own pause)."""
        is_silent = not self.is_reporting(now)
        is_hung = is_silent and self._was_silent
        self._was_silent = is_silent and not is_hung
        if is_hung:
            self._engine.kill()
        return is_hung

    def kill(self) -> None:
        self._engine.kill()

    def close(self) -> None:
        self._engine.close()

    def _forget_tokens(self, request_ids: Iterable[int]) -> None:
        self._sum_tokens -= sum([self._num_tokens.pop(request_id, 0) for request_id in request_ids])

    def _start(self, requests: Sequence[Request]) -> None:
        self._engine.kill()  # dead already; what is left of it is waited for
        self._engine.start()
        self._suspects = {request.request_id for request in requests}
        if requests:
            self._engine.add(list(requests))
