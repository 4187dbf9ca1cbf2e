"""What a person sees while layers are quantized: a bar on a terminal, else a plain line now and then, on stderr."""

from __future__ import annotations

import time
from typing import TextIO

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gristmill.worker.show.progress import MAX_BAR_WIDTH, PLAIN_INTERVAL_S, Clock, build_live, find_console
from gristmill.worker.show.tables import to_duration_text


class LayerProgress:
    """Layers done, and the time left by the mean of those done in this run. A stream that is gone ends nothing."""

    def __init__(self, stream: TextIO, now: Clock = time.monotonic) -> None:
        self._now = now
        self._stream: TextIO | None = stream
        console = find_console(stream)
        self._live: Live | None = None if console is None else build_live(console, Table.grid())
        self._start: tuple[float, int] | None = None
        self._next_s = 0.0
        self._printed = -1

    def __enter__(self) -> LayerProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def update(self, num_done: int, num_layers: int) -> None:
        """Called before each layer and after the last."""
        now = self._now()
        if self._start is None:
            self._start, self._next_s = (now, num_done), now + PLAIN_INTERVAL_S
        start_s, first = self._start
        left = ""
        if first < num_done < num_layers:
            left = f"{to_duration_text((now - start_s) / (num_done - first) * (num_layers - num_done))} left"
        try:
            if self._live is not None:
                self._draw(self._live, num_done, num_layers, left)
            elif now >= self._next_s or num_done == num_layers:
                self._print(num_done, num_layers, left)
                self._next_s = now + PLAIN_INTERVAL_S
        except OSError:  # the reader of our stderr is gone; the model matters more than the line
            self._live = self._stream = None

    def _draw(self, live: Live, num_done: int, num_layers: int, left: str) -> None:
        bar = ProgressBar(total=num_layers, completed=num_done, width=MAX_BAR_WIDTH)
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row(bar, Text(f"{num_done}/{num_layers} layers", "bold"), Text(left, "cyan"))
        if not live.is_started:
            live.start()
        live.update(table, refresh=True)

    def _print(self, num_done: int, num_layers: int, left: str) -> None:
        if self._stream is not None and num_done != self._printed:
            self._printed = num_done
            text = f"{num_done}/{num_layers} layers{', ' + left if left else ''}"
            print(text, file=self._stream, flush=True)
