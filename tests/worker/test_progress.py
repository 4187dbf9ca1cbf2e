"""The live line, the plain lines and the figures in them, with a clock of our own."""

from __future__ import annotations

import io

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


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class ClosedTerminal(Terminal):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


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


def show(meter: ProgressMeter, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(to_live_line(meter, width))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0:00"),
        (7.4, "0:07"),
        (59.6, "1:00"),
        (725, "12:05"),
        (11045, "3:04:05"),
        (86400 * 2 + 11045, "2 d 03:04:05"),
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


def test_time_left_follows_the_recent_row_rate(meter: ProgressMeter, clock: FakeClock) -> None:
    for second in range(1, 101):
        clock.now = 100.0 + second
        meter.update(build_progress(second))
    assert meter.left_s() == pytest.approx(900)


def test_time_left_is_unknown_before_a_row_is_done(meter: ProgressMeter, clock: FakeClock) -> None:
    clock.now += 30
    meter.update(build_progress(0))
    assert meter.left_s() is None
    assert "time left unknown" in to_plain_line(meter)


def test_time_left_counts_only_rows_of_this_run(clock: FakeClock) -> None:
    meter = ProgressMeter(clock)
    meter.start(1000, 900, "job_a")
    clock.now += 10
    meter.update(build_progress(910))
    assert meter.left_s() == pytest.approx(90)


def test_a_plain_line_has_every_figure(meter: ProgressMeter, clock: FakeClock) -> None:
    clock.now += 10
    figures = {"rows_failed": 3, "prompt_tokens": 2000, "cached_tokens": 500, "tokens_per_s": 1234.4}
    meter.update(build_progress(100, **figures))
    assert to_plain_line(meter) == (
        "job_a: 100/1,000 rows (10%), 3 failed, 1,234 tokens/s, 25% of prompt tokens saved, 1:30 left"
    )


def test_the_token_rate_is_measured_when_none_is_given(meter: ProgressMeter, clock: FakeClock) -> None:
    for second in range(10):
        clock.now = 100.0 + second
        meter.update(build_progress(second, completion_tokens=50 * second))
    assert meter.tokens_per_s() == pytest.approx(50)


def test_a_job_that_ends_at_once_still_has_a_token_rate(meter: ProgressMeter, clock: FakeClock) -> None:
    clock.now += 2
    meter.update(build_progress(1000, completion_tokens=500))
    assert meter.tokens_per_s() == pytest.approx(250)


def test_tokens_of_an_earlier_run_are_no_speed(clock: FakeClock) -> None:
    meter = ProgressMeter(clock)
    meter.start(1000, 900, "job_a")
    for second, tokens in ((1, 90_000), (11, 90_100)):
        clock.now = 100.0 + second
        meter.update(build_progress(900 + second, completion_tokens=tokens))
    assert meter.tokens_per_s() == pytest.approx(10)


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


def test_the_live_line_shows_all_of_it_on_a_wide_terminal(meter: ProgressMeter) -> None:
    meter.update(build_progress(123, rows_failed=4, tokens_per_s=321.0, prompt_tokens=10, cached_tokens=5))
    text = show(meter, 120)
    for word in ("job_a", "━", "123/1,000 rows", "4 failed", "321 tok/s", "50% saved", "left"):
        assert word in text


def test_the_bar_is_kept_before_a_long_job_id(clock: FakeClock) -> None:
    meter = ProgressMeter(clock)
    meter.start(1000, 500, "job_01m8ktr7m0nt2btp4vc2w9ynmn")
    assert "━" in show(meter, 80)
    assert "job_01" not in show(meter, 80)
    assert "━" in show(meter, 120)
    assert "job_01" in show(meter, 120)


def test_a_narrow_terminal_keeps_the_rows_and_the_time_left(meter: ProgressMeter) -> None:
    text = show(meter, 30)
    assert "0/1,000 rows" in text
    assert "left" in text
    assert "job_a" not in text


def test_plain_lines_come_every_five_seconds_and_at_the_end(clock: FakeClock) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock)
    display.start(1000, 0, "job_a")
    for tenth in range(124):
        clock.now = 100.0 + tenth / 10
        display.update(build_progress(tenth))
    display.stop()
    done = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert done == ["50/1,000", "100/1,000", "123/1,000"]


def test_a_plain_end_is_not_printed_twice(clock: FakeClock) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock)
    display.start(1000, 0, "job_a")
    clock.now += 6
    display.update(build_progress(1000))
    display.stop()
    display.stop()
    assert stream.getvalue().count("\n") == 1


def test_a_note_before_the_start_is_a_line(clock: FakeClock) -> None:
    stream = io.StringIO()
    display = PlainDisplay(stream, clock)
    display.note("loading the model")
    display.stop()
    assert stream.getvalue() == "loading the model\n"


def test_a_display_outlives_its_stream(clock: FakeClock) -> None:
    display = PlainDisplay(ClosedPipe(), clock)
    display.start(1000, 0, "job_a")
    display.note("one")
    display.note("two")
    display.update(build_progress(5))
    display.stop()


def test_a_live_display_outlives_its_terminal(clock: FakeClock) -> None:
    display = LiveDisplay(Console(file=ClosedTerminal(), force_terminal=True, width=100), clock)
    for _ in range(2):
        display.start(1000, 0, "job_a")
        display.note("one")
        clock.now += 1
        display.update(build_progress(5))
        display.stop()


def test_the_live_line_is_redrawn_at_most_ten_times_a_second(clock: FakeClock) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=100)
    display = LiveDisplay(console, clock)
    display.start(1000, 0, "job_a")
    for step in range(1000):
        clock.now = 100.0 + step / 1000
        display.update(build_progress(step))
    display.stop()
    assert 8 <= console.file.getvalue().count("rows") <= 16  # type: ignore[attr-defined]


def test_a_note_stands_above_the_live_line(clock: FakeClock) -> None:
    console = Console(file=Terminal(), force_terminal=True, width=100, color_system=None)
    display = LiveDisplay(console, clock)
    display.start(1000, 0, "job_a")
    display.note("engine restarted [1 of 3]")
    display.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "engine restarted [1 of 3]\n" in text
    assert text.rindex("0/1,000 rows") > text.index("engine restarted")


def test_a_terminal_gets_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(build_display(Terminal()), LiveDisplay)


@pytest.mark.parametrize(("term", "stream"), [("dumb", Terminal()), ("xterm", io.StringIO())])
def test_plain_lines_where_nothing_can_be_redrawn(
    monkeypatch: pytest.MonkeyPatch, term: str, stream: io.StringIO
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(build_display(stream), PlainDisplay)


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    display: Display = build_display(terminal)
    display.start(1000, 0, "job_a")
    display.stop()
    assert "\x1b[3" not in terminal.getvalue()
    assert "0/1,000 rows" in terminal.getvalue()
