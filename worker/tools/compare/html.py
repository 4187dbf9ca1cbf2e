"""The page of a comparison: its tables, and the pairs that differ most side by side. One file that loads nothing.

Prompts and answers are written by users and models: all of it is escaped, and no script can run on the page.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from html import escape

from gristmill.worker.tools.compare.figures import Figures
from gristmill.worker.tools.compare.pairs import Comparison, Pair
from gristmill.worker.tools.compare.report import (
    ANSWER_HEADS,
    LEGEND,
    SCORE_HEADS,
    has_scores,
    to_answer_cells,
    to_score_cells,
    to_sections,
    to_side_text,
)

MAX_PAIRS = 20  # of each kind on the page; all of them are in pairs.parquet
MAX_CHARACTERS = 20_000  # of a prompt or an answer
MAX_DIFF_WORDS = (
    3000  # of two answers together that are compared word by word; longer ones by beginning and end
)

_WORD = re.compile(r"\s+|\w+|[^\w\s]")
Change = tuple[str, int, int, int, int]  # equal or another word; begin and end in A's words, and in B's

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --mark-a: #f6c0b8; --mark-b: #bfe3c0; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --mark-a: #7a2e25; --mark-b: #24582a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.section th { padding-top: .9rem; font-weight: 600; }
article { border: 1px solid var(--line); border-radius: 6px; margin: 1rem 0; overflow: hidden; }
article header { background: var(--soft); padding: .4rem .8rem; }
.sides { display: grid; grid-template-columns: 1fr 1fr; }
.sides > div { padding: .5rem .8rem; min-width: 0; } .sides > div + div { border-left: 1px solid var(--line); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.5 ui-monospace, monospace; }
details { padding: .3rem .8rem; } .note, .quiet { opacity: .75; }
.a mark { background: var(--mark-a); color: inherit; } .b mark { background: var(--mark-b); color: inherit; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def to_html(comparison: Comparison, payload: Figures) -> str:
    """The whole page."""
    tables = _to_table("Answers", ANSWER_HEADS, payload)
    if has_scores(payload):
        tables += _to_table("Probabilities", SCORE_HEADS, payload)
    sides = "".join(
        f"<p>{side.upper()}: <code>{_text(to_side_text(payload, side))}</code></p>" for side in "ab"
    )
    notes = "".join(f'<p class="note">{_text(note)}</p>' for note in (*LEGEND, *payload["notes"]))
    count = f"{payload['compared']:,} of {payload['rows']:,} rows of {payload['rows_file']}"
    body = f"<h1>Pair by pair</h1>{sides}<p>{_text(count)}</p>{tables}{notes}{_to_pairs(comparison.pairs)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width"><title>gristmill compare</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
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


def mark_differences(a: str, b: str) -> tuple[str, str]:
    """Both texts as HTML, with <mark> around what the other does not have."""
    first, second = (_WORD.findall(text) for text in (a, b))
    if len(first) + len(second) <= MAX_DIFF_WORDS:
        changes: Sequence[Change] = difflib.SequenceMatcher(None, first, second, False).get_opcodes()
    else:
        changes = _find_middle(first, second)
    marked: tuple[list[str], list[str]] = ([], [])
    for tag, a_start, a_stop, b_start, b_stop in changes:
        for side, piece in zip(marked, (first[a_start:a_stop], second[b_start:b_stop]), strict=True):
            text = _text("".join(piece))
            side.append(text if tag == "equal" or not text else f"<mark>{text}</mark>")
    return "".join(marked[0]), "".join(marked[1])


def _find_middle(a: Sequence[str], b: Sequence[str]) -> list[Change]:
    """The changes of two long texts: a common beginning, all between, a common end."""
    shorter = min(len(a), len(b))
    head = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    tail = next((i for i in range(shorter - head) if a[-1 - i] != b[-1 - i]), shorter - head)
    ends = (len(a) - tail, len(b) - tail)
    return [
        ("equal", 0, head, 0, head),
        ("replace", head, ends[0], head, ends[1]),
        ("equal", ends[0], len(a), ends[1], len(b)),
    ]


def _to_table(title: str, heads: Sequence[str], payload: Figures) -> str:
    to_cells = to_answer_cells if heads is ANSWER_HEADS else to_score_cells
    lines = [_to_line("th", ["", *heads])]
    for section in to_sections(payload):
        if section.title:
            lines.append(
                f'<tr class="section"><th colspan="{len(heads) + 1}">by {_text(section.title)}</th></tr>'
            )
        lines += [_to_line("td", [name, *to_cells(figures)]) for name, figures in section.groups.items()]
    return f"<h2>{title}</h2><table>{''.join(lines)}</table>"


def _to_line(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in cells) + "</tr>"


def _to_pairs(pairs: Sequence[Pair]) -> str:
    """The two lists of pairs; one that is in the first is not in the second again."""
    far = find_far_pairs(pairs)
    shown = {id(pair) for pair in far}
    early = [pair for pair in find_early_pairs(pairs) if id(pair) not in shown]
    lists = (("The largest mean KL", far), ("The earliest to part, of the others", early))
    found = [f"<h2>{title}</h2>{''.join(map(_to_pair, listed))}" for title, listed in lists if listed]
    return "".join(found) or "<p>No pair differs.</p>"


def _to_pair(pair: Pair) -> str:
    assert pair.a is not None and pair.b is not None
    facts = [f"row {pair.row.row.row_index}", pair.row.language, f"{len(pair.a.prompt_ids):,} prompt tokens"]
    if pair.first_divergence is not None:
        facts.append(f"part after {pair.first_divergence:,} tokens")
    else:
        facts.append("the same text")
    if pair.scores is not None:
        facts.append(f"KL {pair.scores.kl.mean():.2g} a token, {pair.scores.kl.max():.2g} at most")
    marked = mark_differences(_cut(pair.a.text), _cut(pair.b.text))
    sides = "".join(
        f'<div class="{label.lower()}"><b>{label}</b> <span class="quiet">{_text(answer.finish_reason)},'
        f" {len(answer.token_ids):,} tokens</span><pre>{text}</pre></div>"
        for label, answer, text in zip("AB", (pair.a, pair.b), marked, strict=True)
    )
    prompt = f"<details open><summary>prompt</summary><pre>{_text(_cut(pair.row.prompt))}</pre></details>"
    return f"<article><header>{_text(' · '.join(facts))}</header>{prompt}<div class='sides'>{sides}</div></article>"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " ..."


def _text(text: str) -> str:
    return escape(text, quote=True)
