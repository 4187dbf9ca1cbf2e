"""Shows the progress of a run on its display, a few times a second."""

from __future__ import annotations

from gristmill.worker.engine.supervisor import EngineSupervisor
from gristmill.worker.run.active_shards import ActiveShards
from gristmill.worker.show.progress import Display, MovingRate


class RunProgress:
    """What the active shards say, and the rate at which the engine generates."""

    def __init__(
        self, display: Display, active: ActiveShards, engine: EngineSupervisor, interval_s: float
    ) -> None:
        self._display = display
        self._active = active
        self._engine = engine
        self._interval_s = interval_s
        self._last_s = 0.0
        self._token_rate = MovingRate()

    def show(self, now: float) -> None:
        """Updates the display if it is time."""
        if now - self._last_s >= self._interval_s:
            self._last_s = now
            self._token_rate.push(now, self._engine.counters.num_output_tokens)
            self._display.update(self._active.progress(self._token_rate.per_s()))

    def show_end(self) -> None:
        """The last figures."""
        self._display.update(self._active.progress())
