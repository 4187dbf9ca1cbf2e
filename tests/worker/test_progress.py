"""The live line, the plain lines and the figures in them, with a clock of our own."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from rich.console import Console

from gristmill.worker.show.progress import (
    Display,
    LiveDisplay,
    MovingRate,
    PlainDisplay,
    Progress,
    ProgressMeter,
    build_display,
    to_live_line,
    to_plain_line,
)
from gristmill.worker.show.tables import to_duration_text


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self._error = error

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._error is not None:
            raise self._error
        return super().write(text)


def build_progress(done: int, **figures: float) -> Progress:
    return Progress(rows_done=done, rows_total=1000, **figures)  # type: ignore[arg-type]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def meter(clock: FakeClock) -> ProgressMeter:
    meter = ProgressMeter(clock)
    meter.start(1000, 0, "job_a")
    return meter


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def plain(stream: io.StringIO, clock: FakeClock) -> PlainDisplay:
    display = PlainDisplay(stream, clock)
    display.start(1000, 0, "job_a")
    return display


def show(meter: ProgressMeter, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(to_live_line(meter, width))
    return stream.getvalue()


def build_live(terminal: Terminal, clock: FakeClock) -> LiveDisplay:
    return LiveDisplay(Console(file=terminal, force_terminal=True, width=100, color_system=None), clock)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (725, "12:05"),
        (11045, "3:04:05"),
        (183845, "2 d 03:04:05"),
    ],
)
def test_durations_read_as_a_clock(seconds: float, text: str) -> None:
    assert to_duration_text(seconds) == text


def test_a_moving_rate_forgets_what_is_older_than_its_window() -> None:
    rate = MovingRate(window_s=10)
    assert rate.per_s() is None
    for second in range(31):
        rate.push(second, 100 * min(second, 10) + 7 * max(0, second - 10))
    assert rate.per_s() == pytest.approx(7)


def test_a_moving_rate_keeps_few_samples_however_often_it_is_fed() -> None:
    rate = MovingRate(window_s=10)
    for step in range(100_000):
        rate.push(step / 1000, step)
    assert len(rate._samples) < 250
    assert rate.per_s() == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize(
    ("first_rows", "updates", "left_s", "tokens_per_s"),
    [
        pytest.param(0, [(s, s, 50 * s) for s in range(1, 101)], 900, 50, id="by the recent rates"),
        pytest.param(0, [(30, 0, 0)], None, 0, id="unknown before a row is done"),
        pytest.param(0, [(2, 1000, 500)], 0, 250, id="a job that ends at once has a rate"),
        pytest.param(900, [(10, 910, 0)], 90, None, id="only rows of this run count"),
        pytest.param(900, [(1, 901, 90_000), (11, 911, 90_100)], 89, 10, id="and only its tokens"),
    ],
)
def test_the_time_left_and_the_token_rate_are_measured(
    clock: FakeClock,
    first_rows: int,
    updates: list[tuple[int, int, int]],
    left_s: float | None,
    tokens_per_s: float | None,
) -> None:
    meter = ProgressMeter(clock)
    meter.start(1000, first_rows, "job_a")
    for second, rows, tokens in updates:
        clock.now = 100.0 + second
        meter.update(build_progress(rows, completion_tokens=tokens))
    assert meter.left_s() == (None if left_s is None else pytest.approx(left_s))
    assert meter.tokens_per_s() == (None if tokens_per_s is None else pytest.approx(tokens_per_s))
    assert ("time left unknown" in to_plain_line(meter)) == (left_s is None)


def test_a_plain_line_has_every_figure(meter: ProgressMeter, clock: FakeClock) -> None:
    clock.now += 10
    figures = {"rows_failed": 3, "prompt_tokens": 2000, "cached_tokens": 500, "tokens_per_s": 1234.4}
    meter.update(build_progress(100, **figures))
    assert to_plain_line(meter) == (
        "job_a: 100/1,000 rows (10%), 3 failed, 1,234 tokens/s, 25% of prompt tokens saved, 1:30 left"
    )


def test_a_job_of_no_rows_is_done(clock: FakeClock) -> None:
    meter = ProgressMeter(clock)
    meter.start(0, 0, "job_a")
    assert to_plain_line(meter) == "job_a: 0/0 rows (100%), 0 failed, 0% of prompt tokens saved"


@pytest.mark.parametrize("width", [10, 24, 40, 60, 80, 100, 200])
def test_the_live_line_never_wraps(meter: ProgressMeter, width: int) -> None:
    meter.update(build_progress(123, rows_failed=4, tokens_per_s=99999.0))
    text = show(meter, width)
    assert text.count("\n") == 1
    assert len(text.rstrip("\n")) <= width


@pytest.mark.parametrize(
    ("job_id", "width", "shown", "left_out"),
    [
        ("job_a", 120, "job_a|━|123/1,000 rows|4 failed|321 tok/s|50% saved|left", ""),
        ("job_a", 30, "123/1,000 rows|left", "job_a|━"),
        ("job_01m8ktr7m0nt2btp4vc2w9ynmn", 80, "━|123/1,000 rows", "job_01"),
        ("job_01m8ktr7m0nt2btp4vc2w9ynmn", 120, "━|job_01", ""),
    ],
)
def test_the_live_line_shows_what_fits_rows_and_time_first_the_id_last(
    meter: ProgressMeter, job_id: str, width: int, shown: str, left_out: str
) -> None:
    meter.start(1000, 0, job_id)
    meter.update(build_progress(123, rows_failed=4, tokens_per_s=321.0, prompt_tokens=10, cached_tokens=5))
    text = show(meter, width)
    assert all(word in text for word in shown.split("|")), text
    assert not any(word in text for word in left_out.split("|") if word), text


def test_plain_lines_come_every_five_seconds_and_at_the_end_once(
    plain: PlainDisplay, stream: io.StringIO, clock: FakeClock
) -> None:
    for tenth in range(124):
        clock.now = 100.0 + tenth / 10
        plain.update(build_progress(tenth))
    plain.stop()
    plain.stop()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == [
        "50/1,000",
        "100/1,000",
        "123/1,000",
    ]


def test_a_plain_end_that_was_due_is_not_printed_twice(
    plain: PlainDisplay, stream: io.StringIO, clock: FakeClock
) -> None:
    clock.now += 6
    plain.update(build_progress(1000))
    plain.stop()
    assert stream.getvalue().count("\n") == 1


def test_a_note_before_the_start_is_a_line(stream: io.StringIO, clock: FakeClock) -> None:
    display = PlainDisplay(stream, clock)
    display.note("loading the model")
    display.stop()
    assert stream.getvalue() == "loading the model\n"


@pytest.mark.parametrize(
    ("build", "error"), [(PlainDisplay, BrokenPipeError()), (build_live, OSError(5, "I/O"))]
)
def test_a_display_outlives_its_stream(
    clock: FakeClock, build: Callable[[Terminal, FakeClock], Display], error: OSError
) -> None:
    display = build(Terminal(error), clock)
    for _ in range(2):
        display.start(1000, 0, "job_a")
        display.note("one")
        clock.now += 6
        display.update(build_progress(5))
        display.stop()


def test_the_live_line_is_redrawn_at_most_ten_times_a_second(clock: FakeClock) -> None:
    display = build_live(terminal := Terminal(), clock)
    display.start(1000, 0, "job_a")
    for step in range(1000):
        clock.now = 100.0 + step / 1000
        display.update(build_progress(step))
    display.stop()
    assert 8 <= terminal.getvalue().count("rows") <= 16


def test_a_note_stands_above_the_live_line(clock: FakeClock) -> None:
    display = build_live(terminal := Terminal(), clock)
    display.start(1000, 0, "job_a")
    display.note("engine restarted [1 of 3]")
    display.stop()
    text = terminal.getvalue()
    assert "engine restarted [1 of 3]\n" in text
    assert text.rindex("0/1,000 rows") > text.index("engine restarted")


@pytest.mark.parametrize(
    ("term", "stream", "kind"),
    [
        ("xterm-256color", Terminal(), LiveDisplay),
        ("dumb", Terminal(), PlainDisplay),
        ("xterm", io.StringIO(), PlainDisplay),
    ],
)
def test_a_live_line_where_it_can_be_redrawn_else_plain_ones(
    monkeypatch: pytest.MonkeyPatch, term: str, stream: io.StringIO, kind: type[Display]
) -> None:
    monkeypatch.setenv("TERM", term)
    if kind is PlainDisplay:
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(build_display(stream)) is kind


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    display: Display = build_display(terminal)
    display.start(1000, 0, "job_a")
    display.stop()
    assert "\x1b[3" not in terminal.getvalue()
    assert "0/1,000 rows" in terminal.getvalue()
