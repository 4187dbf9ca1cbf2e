"""The figures of a comparison as tables on a terminal, all of them made from the payload of `--json`."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gristmill.worker.show.report import to_share_text
from gristmill.worker.tools.compare.figures import EARLY_TOKENS, Figures

MIN_WIDTH, PIPE_WIDTH = 88, 160  # a narrower terminal wraps lines; a file or a pipe has room for long names
ANSWER_HEADS = ("rows", "same", "parts at", f"< {EARLY_TOKENS}", "choices agree", "JSON A", "JSON B")
SCORE_HEADS = ("A's: by A", "by B", "B's: by B", "by A", "KL mean", "KL p99")
LEGEND = (
    "same: equal texts. parts at: tokens before the answers part, median of the rows that do;"
    f" < {EARLY_TOKENS}: share of all rows that part within {EARLY_TOKENS} tokens.",
    "A's, B's: perplexity of A's answers and of B's, by each model. KL: KL(A || B) a token of A's answers, in nats.",
)

ToCells = Callable[[Figures], tuple[str, ...]]


class Section(NamedTuple):
    """Groups that belong together. title: empty for all rows."""

    title: str
    groups: dict[str, Figures]


def to_sections(payload: Figures) -> list[Section]:
    """All rows, then by language and by length."""
    return [
        Section("", {"all rows": payload["overall"]}),
        Section("language", payload["by_language"]),
        Section("prompt tokens", payload["by_prompt_tokens"]),
    ]


def has_scores(payload: Figures) -> bool:
    """Whether there is any probability to show."""
    return bool(payload["overall"]["scored_rows"])


def to_answer_cells(figures: Figures) -> tuple[str, ...]:
    """One group's cells under ANSWER_HEADS."""
    parted, choices = figures["first_divergence"], figures["choices"]
    agree = "-" if choices["agree"] is None else f"{to_share_text(choices['agree'])} of {choices['rows']:,}"
    return (
        f"{figures['rows']:,}",
        to_share_text(figures["same"]),
        "-" if parted["median"] is None else f"{parted['median']:g}",
        to_share_text(parted[f"within_{EARLY_TOKENS}"]),
        agree,
        to_share_text(figures["json"]["a"]),
        to_share_text(figures["json"]["b"]),
    )


def to_score_cells(figures: Figures) -> tuple[str, ...]:
    """One group's cells under SCORE_HEADS."""
    found, kl = figures["perplexity"], figures["kl"]
    names = ("a_under_a", "a_under_b", "b_under_b", "b_under_a")
    return (
        *("-" if found[name] is None else f"{found[name]:,.3f}" for name in names),
        *("-" if kl[name] is None else f"{kl[name]:.2g}" for name in ("mean", "p99")),
    )


def to_side_text(payload: Figures, side: str) -> str:
    """The model of a side, what is set, and what it ran as."""
    settings = "".join(f", {key} {value}" for key, value in payload[side]["settings"].items())
    engine = payload["engines"][side]
    bits = f"{engine['linear_bits']:.3g} bits a weight, {engine['kv_bits']} a key or value"
    return f"{payload[side]['model']}{settings} ({engine['dtype']}, {bits})"


def to_compare_text(payload: Figures, width: int | None = None, colors: bool = False) -> str:
    """The tables of `compare`. width: of the terminal, if it is one; colors: with escape codes."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=PIPE_WIDTH if width is None else max(width, MIN_WIDTH),
        force_terminal=colors,
        color_system="auto" if colors else None,
        highlight=False,
    )
    for side in ("a", "b"):
        console.print(Text(f"{side.upper()}  {to_side_text(payload, side)}"), soft_wrap=True)
    tokens = payload["overall"]["tokens"]
    counts = (
        f"{payload['compared']:,} of {payload['rows']:,} rows, answers of {tokens['a']:,} and {tokens['b']:,}"
    )
    console.print(Text(f"{counts} tokens; {payload['rows_file']}"), soft_wrap=True)
    console.print(_build_table(payload, "answers", ANSWER_HEADS))
    if has_scores(payload):
        console.print(_build_table(payload, "probabilities", SCORE_HEADS))
    for line in LEGEND if has_scores(payload) else LEGEND[:1]:
        console.print(Text(line, "dim"))
    for note in payload["notes"]:
        console.print(Text(f"note: {note}", "yellow"), soft_wrap=True)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def _build_table(payload: Figures, title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    to_cells = to_answer_cells if heads is ANSWER_HEADS else to_score_cells
    for name, cells in _iterate_lines(payload, to_cells):
        table.add_row(Text(name, "" if cells else "dim"), *cells)
    return table


def _iterate_lines(payload: Figures, to_cells: ToCells) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, cells) of each line; a section's title has no cells."""
    for section in to_sections(payload):
        if section.title:
            yield f"by {section.title}", ()
        for name, figures in section.groups.items():
            yield (f"  {name}" if section.title else name), to_cells(figures)
