"""Keeps the engine process supplied with rows, within a credit window, over its deaths.

After a death only the rows that were in flight go in again (worker/engine/crash_search.py says how), and nothing else
until they are through. A row that dies alone becomes `poisoned`, but only if a canary row survives after it:
else the host is ill, and no row is blamed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gristmill.engine.errors import EngineDied, EngineError
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request, SamplingParams
from gristmill.worker.engine.client import EngineClient
from gristmill.worker.engine.crash_search import SOLO_DEATHS, CrashSearch

MAX_LOAD_DEATHS = 3  # while it loads the model, in a row
MAX_CANARY_DEATHS = 2  # the first may be chance
MAX_CULPRITS = 8  # in a row, without a row that finished: then it is not the rows
ENGINE_TIMEOUT_S = 120.0  # without a word from the engine it counts as hung
LOAD_TIMEOUT_S = 900.0
MAX_TOKENS_IN_FLIGHT = 8_000_000  # of prompts: memory stays flat where rows are long
_TOP_UP_PARTS = 8  # top up by at least this part of the window: few large messages
_CANARY_ID = 0  # rows have ids from 1


class EngineSupervisor:
    """The rows that wait for the engine and those in it. Used by the runner's loop only."""

    def __init__(
        self,
        engine: EngineClient,
        max_rows_in_flight: int,
        engine_timeout_s: float = ENGINE_TIMEOUT_S,
        check_model: Callable[[], None] = lambda: None,
    ) -> None:
        """check_model: called before the engine is started again; raises ModelRefused for other weights."""
        self._engine = engine
        self._check_model = check_model
        self._max_rows = max_rows_in_flight
        self._engine_timeout_s = engine_timeout_s
        self._ready: deque[Request] = deque()
        self._num_tokens: dict[int, int] = {}  # of the prompts that are ready or in flight
        self._sum_tokens = 0
        self._suspects = CrashSearch()
        self._accused: Request | None = None  # while the canary runs
        # A short prompt, until a row has shown that it does no harm.
        self._canary = Request(_CANARY_ID, array("I", [0]), SamplingParams(max_tokens=1))
        self._num_load_deaths = 0
        self._num_canary_deaths = 0
        self._was_silent = False
        self.num_culprits = 0  # since a row finished

    @property
    def max_rows_in_flight(self) -> int:
        return self._max_rows

    @property
    def num_in_flight(self) -> int:
        return len(self._engine.in_flight)

    @property
    def has_rows(self) -> bool:
        """Whether any row is ready or in flight."""
        return bool(self._num_tokens)

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
        if self._suspects or self._accused or num_added <= 0:
            return
        if num_added < len(self._ready) and room < self._max_rows // _TOP_UP_PARTS:
            return
        self._engine.add([self._ready.popleft() for _ in range(num_added)])

    def poll(self, timeout_s: float) -> list[Completion]:
        """What the engine finished; raises EngineDied and ModelRefused as the client does."""
        is_watched = bool(self._suspects) or self._accused is not None
        sent = dict(self._engine.in_flight) if is_watched else self._engine.in_flight
        sample = next(iter(sent.values()), None)
        completions = self._engine.poll(timeout_s)
        if not completions:
            return completions
        if is_watched:
            completions = self._convict(completions)
        if completions and completions[-1].error_code != "poisoned":
            self.num_culprits = 0
            if sample is not None and sample.request_id not in self._engine.in_flight:
                self._canary = replace(sample, request_id=_CANARY_ID)
        request_ids = [completion.request_id for completion in completions]
        self._forget_tokens(request_ids)
        if self._suspects.discard(request_ids):
            self._engine.add(self._suspects.present)
        return completions

    def restart(self) -> bool:
        """Starts a dead engine again with the rows that were in flight. False: the host is ill.

        Raises ModelRefused when the model has changed.
        """
        in_flight = [r for r in self._engine.in_flight.values() if r.request_id != _CANARY_ID]
        if self._engine.info is None:
            self._num_load_deaths += 1
            if self._num_load_deaths >= MAX_LOAD_DEATHS:
                return False
        else:
            self._num_load_deaths = 0
            if self._accused is not None:
                self._num_canary_deaths += 1
                if self._num_canary_deaths >= MAX_CANARY_DEATHS:
                    return False
            elif in_flight:
                self._num_canary_deaths = 0
                self._accused = self._suspects.blame(in_flight)
                in_flight = self._suspects.present
        self._engine.kill()  # dead already; what is left of it is waited for
        self._check_model()
        self._engine.start()
        rows = [self._canary] if self._accused is not None else in_flight
        if rows:
            self._engine.add(rows)
        return True

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forgets rows, whether they are ready or in flight."""
        forgotten = set(request_ids)
        self._forget_tokens(forgotten)
        self._ready = deque(r for r in self._ready if r.request_id not in forgotten)
        self._engine.cancel([i for i in forgotten if i in self._engine.in_flight])
        if self._suspects.discard(forgotten) and self._accused is None:
            self._engine.add(self._suspects.present)

    def is_reporting(self, now: float) -> bool:
        """Whether the engine said something lately; loading may take longer."""
        limit_s = self._engine_timeout_s if self._engine.info is not None else LOAD_TIMEOUT_S
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

    def kill_and_drain(self) -> list[Completion]:
        """Kills the engine; the completions that it had sent."""
        self._engine.kill()
        completions: list[Completion] = []
        try:
            while more := self.poll(0.0):
                completions += more
        except EngineError:  # it is dead by our own hand
            pass
        return completions

    def close(self) -> None:
        self._engine.close()

    def _convict(self, completions: list[Completion]) -> list[Completion]:
        """Once the canary is through, the accused row gets its error; the other suspects go in."""
        others = [completion for completion in completions if completion.request_id != _CANARY_ID]
        if len(others) == len(completions):
            return others
        accused, self._accused = self._accused, None
        if accused is not None and accused.request_id in self._num_tokens:
            self.num_culprits += 1
            others.append(_build_poisoned(accused))
        if self._suspects:
            self._engine.add(self._suspects.present)
        return others

    def _forget_tokens(self, request_ids: Iterable[int]) -> None:
        self._sum_tokens -= sum([self._num_tokens.pop(request_id, 0) for request_id in request_ids])


def _build_poisoned(request: Request) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=array("I"),
        text="",
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        queue_wait_s=0.0,
        time_to_first_token_s=0.0,
        time_per_token_s=0.0,
        error_code="poisoned",
        error_message=f"the engine process died {SOLO_DEATHS} times with this row alone in it, and lived on"
        " without it",
    )


def load_model(
    client: EngineClient, should_stop: Callable[[], bool], note: Callable[[str], None]
) -> EngineInfo:
    """Waits until the started engine has its model. One that was killed meanwhile, as by a full memory, is started
    again a few times; raises EngineError.
    """
    num_deaths = 0
    while True:
        try:
            return client.wait_loaded(LOAD_TIMEOUT_S, should_stop)
        except EngineDied as died:
            num_deaths += 1
            was_killed = died.exit_code is not None and died.exit_code < 0
            if should_stop() or not was_killed or num_deaths == MAX_LOAD_DEATHS:
                raise
            note(f"{died}; started again")
            client.start()
