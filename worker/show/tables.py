"""How figures are written for people: numbers, and tables of them. One way for all reports; plain text for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

LABEL_WIDTH = 13
PLAIN_WIDTH = 10_000  # of what is no terminal: nothing wraps


def to_text(*parts: RenderableType, width: int = PLAIN_WIDTH, colors: bool = False) -> str:
    """The parts below each other, without spaces at the ends of lines. colors: with escape codes."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=colors,
        color_system="auto" if colors else None,
        highlight=False,
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def build_line(text: str, style: str = "") -> Text:
    """A text that is left to the terminal to wrap, as a path should be."""
    return Text(text, style, no_wrap=True)


def build_table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None, right: bool = False
) -> Table:
    """Columns as wide as their widest cell, two spaces between them. right: all but the first are set to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if right and index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def to_fields_text(head: str, fields: Iterable[tuple[str, str]]) -> str:
    """A line, and below it one for each label with its text."""
    return "\n".join([head, *(f"  {label:<{LABEL_WIDTH}} {text}".rstrip() for label, text in fields)])


def to_duration_text(seconds: float) -> str:
    """`0:07`, `12:05`, `3:04:05`, `2 d 03:04:05`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    if hours == 0:
        return f"{minute}:{second:02d}"
    days, hour = divmod(hours, 24)
    clock = f"{minute:02d}:{second:02d}"
    return f"{days} d {hour:02d}:{clock}" if days else f"{hour}:{clock}"


def to_share_text(share: float | None) -> str:
    """A share as a percentage; "-" for none."""
    return "-" if share is None else f"{share:.1%}"


def to_number_text(value: float) -> str:
    """Three figures, or whole numbers from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def to_seconds_text(seconds: float | None) -> str:
    """`340 us`, `1.2 ms`, `4.56 s`, `12:05`: three figures at most."""
    if seconds is None:
        return "-"
    if seconds >= 100:
        return to_duration_text(seconds)
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return "0 s"
