"""What a person sees while a job runs: one live line on a terminal, else a plain line every five seconds.

Written to stderr only, so that stdout stays clean for the final table. A display never ends a job: once its
stream is gone it goes quiet.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gristmill.worker.show.tables import to_duration_text

PLAIN_INTERVAL_S = 5.0
LIVE_INTERVAL_S = 0.1
RATE_WINDOW_S = 20.0
ROW_RATE_WINDOW_S = 60.0  # rows finish in waves: a longer look makes a steadier time left
MIN_BAR_WIDTH = 8
MAX_BAR_WIDTH = 40

Clock = Callable[[], float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. tokens_per_s: output tokens; None: the display measures completion_tokens."""

    rows_done: int  # completed, failed and skipped, those of earlier runs included
    rows_total: int
    rows_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed again
    tokens_per_s: float | None = None


class Display(Protocol):
    """Where a run reports its progress; called from one thread. `note` may come before `start`."""

    def start(self, total_rows: int, done_rows: int, job_id: str = "") -> None: ...

    def update(self, progress: Progress) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


class MovingRate:
    """Change per second of a growing count over the last `window_s` seconds."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def push(self, now: float, count: float) -> None:
        if self._samples and now - self._samples[-1][0] < self._window_s / 100:
            return
        self._samples.append((now, count))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._window_s:
            self._samples.popleft()

    def per_s(self) -> float | None:
        """None until two samples are there."""
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return max(0.0, last - first) / (last_s - first_s)


class ProgressMeter:
    """The figures of a progress line: the latest Progress and the two moving rates."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self.start(0, 0, "")

    def start(self, total_rows: int, done_rows: int, job_id: str) -> None:
        self._start_s, self._start_rows, self.job_id = self._now(), done_rows, job_id
        self._rows, self._tokens = MovingRate(ROW_RATE_WINDOW_S), MovingRate()
        self._rows.push(self._start_s, done_rows)
        if done_rows == 0:  # else the tokens of earlier runs come with the first update
            self._tokens.push(self._start_s, 0)
        self.progress = Progress(rows_done=done_rows, rows_total=total_rows)

    def update(self, progress: Progress) -> None:
        now = self._now()
        self._rows.push(now, progress.rows_done)
        self._tokens.push(now, progress.completion_tokens)
        self.progress = progress

    def tokens_per_s(self) -> float | None:
        given = self.progress.tokens_per_s
        return given if given is not None else self._tokens.per_s()

    def left_s(self) -> float | None:
        """Time left by the recent row rate; by the rate since the start while nothing finishes; else None."""
        left = self.progress.rows_total - self.progress.rows_done
        if left <= 0:
            return 0.0
        rate = self._rows.per_s()
        if not rate:
            elapsed_s = self._now() - self._start_s
            rate = (self.progress.rows_done - self._start_rows) / elapsed_s if elapsed_s > 0 else 0.0
        return left / rate if rate > 0 else None

    def share_done(self) -> float:
        total = self.progress.rows_total
        return min(1.0, self.progress.rows_done / total) if total else 1.0

    def share_saved(self) -> float:
        total = self.progress.prompt_tokens
        return self.progress.cached_tokens / total if total else 0.0


def to_plain_line(meter: ProgressMeter) -> str:
    """The progress as one line without any control characters."""
    progress, rate, left_s = meter.progress, meter.tokens_per_s(), meter.left_s()
    parts = [
        f"{progress.rows_done:,}/{progress.rows_total:,} rows ({int(meter.share_done() * 100)}%)",
        f"{progress.rows_failed:,} failed",
    ]
    if rate is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    parts.append(f"{meter.share_saved():.0%} of prompt tokens saved")
    if left_s is None:
        parts.append("time left unknown")
    elif left_s > 0:
        parts.append(f"{to_duration_text(left_s)} left")
    return f"{meter.job_id or 'job'}: " + ", ".join(parts)


def to_live_line(meter: ProgressMeter, width: int) -> Table:
    """The progress as one line of `width` cells at most: what does not fit is left out, the id first."""
    progress, rate, left_s = meter.progress, meter.tokens_per_s(), meter.left_s()
    failed = Text(f"{progress.rows_failed:,} failed", "red" if progress.rows_failed else "dim")
    rows = Text(f"{progress.rows_done:,}/{progress.rows_total:,} rows", "bold")
    left = Text("--:-- left" if left_s is None else f"{to_duration_text(left_s)} left", "cyan")
    speed = Text("-- tok/s" if rate is None else f"{rate:,.0f} tok/s", "magenta")
    saved = Text(f"{meter.share_saved():.0%} saved", "green")
    job = Text(meter.job_id, "dim")
    shown: set[int] = set()
    used = -2
    for cell in (rows, left, failed, speed, saved, job):  # the most wanted first; the bar before the job's id
        room = width - MIN_BAR_WIDTH - 3 if cell is job else width
        if cell.cell_len and used + 2 + cell.cell_len <= room:
            shown.add(id(cell))
            used += 2 + cell.cell_len
    line = [cell for cell in (rows, failed, speed, saved, left) if id(cell) in shown]
    table = Table.grid(padding=(0, 2, 0, 0))
    cells: list[Text | ProgressBar] = [job] if id(job) in shown else []
    bar_width = min(MAX_BAR_WIDTH, width - used - 3)
    if bar_width >= MIN_BAR_WIDTH:
        cells.append(ProgressBar(total=1.0, completed=meter.share_done(), width=bar_width))
    for _ in range(len(cells) + len(line)):
        table.add_column(no_wrap=True)
    table.add_row(*cells, *line)
    return table


class PlainDisplay:
    """A line every five seconds and one at the end, for logs, pipes and dumb terminals."""

    def __init__(self, stream: TextIO, now: Clock = time.monotonic) -> None:
        self._stream: TextIO | None = stream
        self._now = now
        self._meter = ProgressMeter(now)
        self._next_s: float | None = None
        self._printed: Progress | None = None

    def start(self, total_rows: int, done_rows: int, job_id: str = "") -> None:
        self._meter.start(total_rows, done_rows, job_id)
        self._next_s = self._now() + PLAIN_INTERVAL_S

    def update(self, progress: Progress) -> None:
        self._meter.update(progress)
        if self._next_s is not None and self._now() >= self._next_s:
            self._next_s = self._now() + PLAIN_INTERVAL_S
            self._print_progress()

    def note(self, text: str) -> None:
        self._print(text)

    def stop(self) -> None:
        if self._next_s is not None and self._printed is not self._meter.progress:
            self._print_progress()
        self._next_s = None

    def _print_progress(self) -> None:
        self._printed = self._meter.progress
        self._print(to_plain_line(self._meter))

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except OSError:  # the reader of our stderr is gone; the rows matter more than the line
            self._stream = None


class LiveDisplay:
    """One line that is redrawn in place; notes scroll above it."""

    def __init__(self, console: Console, now: Clock = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._meter = ProgressMeter(now)
        self._live: Live | None = None
        self._next_s = 0.0

    def start(self, total_rows: int, done_rows: int, job_id: str = "") -> None:
        self._meter.start(total_rows, done_rows, job_id)
        self._live = build_live(self._console, self._build_line())
        self._draw(lambda live: live.start(refresh=True))

    def update(self, progress: Progress) -> None:
        self._meter.update(progress)
        if self._now() >= self._next_s:
            self._next_s = self._now() + LIVE_INTERVAL_S
            self._draw(lambda live: live.update(self._build_line(), refresh=True))

    def note(self, text: str) -> None:
        with suppress(OSError):
            self._console.print(Text(text), soft_wrap=True)

    def stop(self) -> None:
        self._draw(lambda live: live.update(self._build_line(), refresh=True))
        self._draw(lambda live: live.stop())
        self._live = None

    def _draw(self, draw: Callable[[Live], None]) -> None:
        if self._live is None:
            return
        try:
            draw(self._live)
        except OSError:  # the terminal was closed; the rows matter more than the line
            self._live = None

    def _build_line(self) -> Table:
        return to_live_line(self._meter, self._console.width)


class LogDisplay:
    """A display for a process that nobody watches: notes go to the log, progress to the database."""

    def __init__(self, level: int = logging.WARNING) -> None:
        self._level = level

    def start(self, total_rows: int, done_rows: int, job_id: str = "") -> None:
        """Nothing."""

    def update(self, progress: Progress) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        logger.log(self._level, "%s", text)

    def stop(self) -> None:
        """Nothing."""


def find_console(stream: TextIO) -> Console | None:
    """A console where the stream is a terminal that can redraw a line (TERM=dumb can't)."""
    console = Console(file=stream, highlight=False)
    return console if console.is_terminal and stream.isatty() and not console.is_dumb_terminal else None


def build_live(console: Console, line: Table) -> Live:
    """What redraws the line when it is told to, and leaves stdout and stderr alone."""
    return Live(
        line,
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
        vertical_overflow="crop",
    )


def build_display(stream: TextIO, now: Clock = time.monotonic) -> Display:
    """A live line where it can be redrawn, else plain lines."""
    console = find_console(stream)
    return PlainDisplay(stream, now) if console is None else LiveDisplay(console, now)
