"""The page of a comparison: its tables, and the pairs that differ most side by side. One file that loads nothing.

Prompts and answers are written by users and models: all of it is escaped, and no script can run on the page.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from gristmill.worker.tools.compare.answers import count_common
from gristmill.worker.tools.compare.figures import Figures
from gristmill.worker.tools.compare.pairs import Comparison, Pair
from gristmill.worker.tools.compare.report import LEGEND, to_side_text, to_tables

MAX_PAIRS = 20  # of each kind on the page; all of them are in pairs.parquet
MAX_CHARACTERS = 20_000  # of a prompt or an answer
MAX_DIFF_WORDS = 3000  # of two answers together, compared word by word; longer ones by beginning and end

_WORD = re.compile(r"\s+|\w+|[^\w\s]")
Change = tuple[str, int, int, int, int]  # equal or another word; begin and end in A's words, and in B's

_TEMPLATE = Path(__file__).with_name("page.html")


def to_html(comparison: Comparison, payload: Figures) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    far = find_far_pairs(comparison.pairs)
    shown = {id(pair) for pair in far}
    early = [pair for pair in find_early_pairs(comparison.pairs) if id(pair) not in shown]
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        sides=[(side.upper(), to_side_text(payload, side)) for side in "ab"],
        count=f"{payload['compared']:,} of {payload['rows']:,} rows of {payload['rows_file']}",
        tables=[(title.capitalize(), heads, lines) for title, heads, lines in to_tables(payload)],
        notes=(*LEGEND, *payload["notes"]),
        lists=[
            ("The largest mean KL", [_to_shown(pair) for pair in far]),
            ("The earliest to part, of the others", [_to_shown(pair) for pair in early]),
        ],
    )


def find_far_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs whose distributions are furthest apart, by mean KL; none where there are no scores."""
    scored = [(float(pair.scores.kl.mean()), pair) for pair in pairs if pair.scores is not None]
    ranked = sorted(scored, key=lambda item: (-item[0], item[1].row.row.row_index))
    return [pair for kl, pair in ranked[:MAX_PAIRS] if kl > 0]


def find_early_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """The pairs whose texts part first."""
    parted = [(pair.first_divergence, pair) for pair in pairs if pair.first_divergence is not None]
    ranked = sorted(parted, key=lambda item: (item[0], item[1].row.row.row_index))
    return [pair for _, pair in ranked[:MAX_PAIRS]]


def mark_differences(a: str, b: str) -> tuple[Markup, Markup]:
    """Both texts as HTML, with <mark> around what the other does not have."""
    first, second = (_WORD.findall(text) for text in (a, b))
    if len(first) + len(second) <= MAX_DIFF_WORDS:
        changes: Sequence[Change] = difflib.SequenceMatcher(None, first, second, False).get_opcodes()
    else:
        changes = _find_middle(first, second)
    marked: tuple[list[Markup], list[Markup]] = ([], [])
    for tag, a_start, a_stop, b_start, b_stop in changes:
        for side, piece in zip(marked, (first[a_start:a_stop], second[b_start:b_stop]), strict=True):
            text = escape("".join(piece))
            side.append(text if tag == "equal" or not text else Markup("<mark>{}</mark>").format(text))
    return Markup("").join(marked[0]), Markup("").join(marked[1])


def _find_middle(a: Sequence[str], b: Sequence[str]) -> list[Change]:
    """The changes of two long texts: a common beginning, all between, a common end."""
    head = count_common(a, b)
    tail = min(count_common(a[::-1], b[::-1]), min(len(a), len(b)) - head)
    ends = (len(a) - tail, len(b) - tail)
    return [
        ("equal", 0, head, 0, head),
        ("replace", head, ends[0], head, ends[1]),
        ("equal", ends[0], len(a), ends[1], len(b)),
    ]


def _to_shown(pair: Pair) -> dict[str, Any]:
    """What the page says of a pair."""
    assert pair.a is not None and pair.b is not None
    facts = [f"row {pair.row.row.row_index}", pair.row.language, f"{len(pair.a.prompt_ids):,} prompt tokens"]
    parted = pair.first_divergence
    facts.append("the same text" if parted is None else f"part after {parted:,} tokens")
    if pair.scores is not None:
        facts.append(f"KL {pair.scores.kl.mean():.2g} a token, {pair.scores.kl.max():.2g} at most")
    marked = mark_differences(_cut(pair.a.text), _cut(pair.b.text))
    sides = list(zip("AB", (pair.a, pair.b), marked, strict=True))
    return {"facts": facts, "prompt": _cut(pair.row.prompt), "sides": sides}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."
