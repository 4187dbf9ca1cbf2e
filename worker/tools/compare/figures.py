"""The figures of a comparison, over all rows, by language and by prompt length: a dictionary for `--json` and files.

Shares lie in 0..1; None stands where there is nothing to count. first_divergence counts the tokens before answers part.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gristmill.worker.tools.compare.pairs import Answer, Comparison, Pair

Figures = dict[str, Any]

EARLY_TOKENS = 10  # an answer that parts within so many is another answer, not another ending
LENGTHS = (32, 128, 512, 2048)  # upper bounds of the groups by prompt tokens
LENGTH_LABELS = ("1-32", "33-128", "129-512", "513-2048", "over 2048")
MAX_GROUPS = 30
OTHERS = "others"


def to_compare_payload(comparison: Comparison, rows_file: str) -> Figures:
    """What `compare --json` prints and summary.json holds."""
    pairs = [pair for pair in comparison.pairs if pair.error is None]
    failed = [pair for pair in comparison.pairs if pair.error is not None]
    sides = zip(comparison.sides, comparison.infos, strict=True)
    return {
        "rows_file": rows_file,
        "a": {"model": comparison.sides[0].path, "settings": dict(comparison.sides[0].settings)},
        "b": {"model": comparison.sides[1].path, "settings": dict(comparison.sides[1].settings)},
        "engines": {side.label.lower(): asdict(info) for side, info in sides},
        "rows": len(comparison.pairs),
        "compared": len(pairs),
        "failed": len(failed),
        "first_error": failed[0].error if failed else None,
        "max_tokens": comparison.max_tokens,
        "choices": list(comparison.choices),
        "notes": to_notes(comparison),
        "overall": to_figures(pairs, comparison.choices),
        "by_language": to_groups(pairs, comparison.choices, lambda pair: pair.row.language),
        "by_prompt_tokens": to_groups(pairs, comparison.choices, to_length_label, LENGTH_LABELS),
    }


def to_notes(comparison: Comparison) -> list[str]:
    """What a reader of the figures has to know."""
    notes = []
    if comparison.unscored is not None:
        notes.append(f"no perplexity and no KL: {comparison.unscored}")
    else:
        compared = [pair for pair in comparison.pairs if pair.error is None]
        num_unscored = sum(pair.scores is None for pair in compared)
        if num_unscored:
            notes.append(
                f"{num_unscored:,} rows have no scores: an answer does not fit behind the other's prompt"
            )
        if comparison.num_unlike_prompts:
            notes.append(
                f"{comparison.num_unlike_prompts:,} rows have unlike prompt tokens on both sides (another chat"
                " template): each model scores answers behind its own prompt"
            )
    failed = [pair for pair in comparison.pairs if pair.error is not None]
    if failed:
        row = failed[0].row.row.row_index
        notes.append(
            f"{len(failed):,} rows could not run and are left out; the first, row {row}: {failed[0].error}"
        )
    return notes


def to_length_label(pair: Pair) -> str:
    """The group of A's prompt by its tokens."""
    assert pair.a is not None
    return LENGTH_LABELS[bisect_left(LENGTHS, len(pair.a.prompt_ids))]


def to_groups(
    pairs: Sequence[Pair], choices: Sequence[str], label: Callable[[Pair], str], order: Sequence[str] = ()
) -> dict[str, Figures]:
    """Figures by group, in this order or else those with the most rows first; small ones beyond a limit are one."""
    counts = Counter(label(pair) for pair in pairs)
    names = sorted(counts, key=order.index if order else lambda name: (-counts[name], name))
    kept = names if len(names) <= MAX_GROUPS else names[: MAX_GROUPS - 1]
    grouped: dict[str, list[Pair]] = {name: [] for name in kept}
    for pair in pairs:
        name = label(pair)
        grouped.setdefault(name if name in kept else OTHERS, []).append(pair)
    return {name: to_figures(found, choices) for name, found in grouped.items()}


def to_figures(pairs: Sequence[Pair], choices: Sequence[str]) -> Figures:
    """The figures of one group of pairs that have answers."""
    answers_a = [pair.a for pair in pairs if pair.a is not None]
    answers_b = [pair.b for pair in pairs if pair.b is not None]
    parted = [pair.first_divergence for pair in pairs if pair.first_divergence is not None]
    return {
        "rows": len(pairs),
        "same": share(pair.is_same for pair in pairs),
        "first_divergence": {
            "rows": len(parted),
            "median": statistics.median(parted) if parted else None,
            f"within_{EARLY_TOKENS}": share(
                pair.first_divergence is not None and pair.first_divergence < EARLY_TOKENS for pair in pairs
            ),
        },
        "choices": to_choice_figures(answers_a, answers_b),
        "json": {"a": share(a.is_json for a in answers_a), "b": share(b.is_json for b in answers_b)},
        "tokens": {
            "a": sum(len(a.token_ids) for a in answers_a),
            "b": sum(len(b.token_ids) for b in answers_b),
        },
        **to_score_figures([pair for pair in pairs if pair.scores is not None]),
    }


def to_choice_figures(answers_a: Sequence[Answer], answers_b: Sequence[Answer]) -> Figures:
    """Agreement over the rows where at least one side chose; a side that chose nothing does not agree."""
    chosen = [(a.choice, b.choice) for a, b in zip(answers_a, answers_b, strict=True)]
    counted = [(a, b) for a, b in chosen if a is not None or b is not None]
    return {
        "rows": len(counted),
        "agree": share(a == b for a, b in counted),
        "none_a": sum(a is None for a, _ in chosen),
        "none_b": sum(b is None for _, b in chosen),
    }


def to_score_figures(pairs: Sequence[Pair]) -> Figures:
    """Perplexities and KL(A || B) over A's answers, of pairs with scores; every token counts the same."""
    found = [pair.scores for pair in pairs if pair.scores is not None]
    num_a = sum(len(pair.a.token_ids) for pair in pairs if pair.a is not None)
    num_b = sum(len(pair.b.token_ids) for pair in pairs if pair.b is not None)
    kl = np.concatenate([scores.kl for scores in found]).astype(np.float64) if found else np.empty(0)
    return {
        "scored_rows": len(found),
        "perplexity": {
            "a_under_a": perplexity(sum(scores.a_under_a for scores in found), num_a),
            "a_under_b": perplexity(sum(scores.a_under_b for scores in found), num_a),
            "b_under_b": perplexity(sum(scores.b_under_b for scores in found), num_b),
            "b_under_a": perplexity(sum(scores.b_under_a for scores in found), num_b),
        },
        "kl": {
            "mean": to_finite(kl.mean()) if len(kl) else None,
            "p99": to_finite(np.percentile(kl, 99, method="inverted_cdf")) if len(kl) else None,
            "max": to_finite(kl.max()) if len(kl) else None,
        },
    }


def share(flags: Iterable[bool]) -> float | None:
    """How many of them are true; None of none."""
    listed = list(flags)
    return sum(listed) / len(listed) if listed else None


def perplexity(logprob_sum: float, num_tokens: int) -> float | None:
    """Exp of the mean surprise; None without tokens, or beyond every number."""
    if not num_tokens or not -700 < logprob_sum / num_tokens <= 0:
        return None
    return math.exp(-logprob_sum / num_tokens)


def to_finite(value: Any) -> float | None:
    """The number, or None where JSON has none for it."""
    return float(value) if math.isfinite(value) else None
