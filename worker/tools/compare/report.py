"""The figures of a comparison as tables on a terminal, all of them made from the payload of `--json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rich.text import Text

from gristmill.worker.show.tables import build_line, build_table, to_share_text, to_text
from gristmill.worker.tools.compare.figures import EARLY_TOKENS, Figures

MIN_WIDTH, PIPE_WIDTH = 88, 160  # a narrower terminal wraps lines; a file or a pipe has room for long names
ANSWER_HEADS = ("rows", "same", "parts at", f"< {EARLY_TOKENS}", "choices agree", "JSON A", "JSON B")
SCORE_HEADS = ("A's: by A", "by B", "B's: by B", "by A", "KL mean", "KL p99")
LEGEND = (
    "same: equal texts. parts at: tokens before the answers part, median of the rows that do;"
    f" < {EARLY_TOKENS}: share of all rows that part within {EARLY_TOKENS} tokens.",
    "A's, B's: perplexity of A's answers and of B's, by each model. KL: KL(A || B) a token of A's answers, in nats.",
)

Line = tuple[str, tuple[str, ...]]  # a group's name and cells; the title of a section has none


class FigureTable(NamedTuple):
    """One table of a comparison, for a terminal and for the page."""

    title: str
    heads: tuple[str, ...]
    lines: list[Line]


def to_tables(payload: Figures) -> list[FigureTable]:
    """The answers and, where there are any, the probabilities: all rows, then by language and by length."""
    kinds: list[tuple[str, tuple[str, ...], Callable[[Figures], tuple[str, ...]]]] = [
        ("answers", ANSWER_HEADS, to_answer_cells),
        ("probabilities", SCORE_HEADS, to_score_cells),
    ]
    tables = []
    for title, heads, to_cells in kinds if has_scores(payload) else kinds[:1]:
        lines: list[Line] = [("all rows", to_cells(payload["overall"]))]
        for name, key in (("by language", "by_language"), ("by prompt tokens", "by_prompt_tokens")):
            lines.append((name, ()))
            lines += [(f"  {group}", to_cells(figures)) for group, figures in payload[key].items()]
        tables.append(FigureTable(title, heads, lines))
    return tables


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
    tokens = payload["overall"]["tokens"]
    counts = (
        f"{payload['compared']:,} of {payload['rows']:,} rows, answers of {tokens['a']:,} and {tokens['b']:,}"
        f" tokens; {payload['rows_file']}"
    )
    tables = [
        build_table(
            ("", *found.heads),
            [(Text(name, "" if cells else "dim"), *cells) for name, cells in found.lines],
            title=found.title,
            right=True,
        )
        for found in to_tables(payload)
    ]
    return to_text(
        *(build_line(f"{side.upper()}  {to_side_text(payload, side)}") for side in ("a", "b")),
        build_line(counts),
        *tables,
        *(Text(line, "dim") for line in LEGEND[: len(tables)]),
        *(build_line(f"note: {note}", "yellow") for note in payload["notes"]),
        width=PIPE_WIDTH if width is None else max(width, MIN_WIDTH),
        colors=colors,
    )
