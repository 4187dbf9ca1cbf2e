"""Pairs made by hand, for the tests of what is reported of them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from gristmill.engine.request import EngineInfo
from gristmill.jobs.rows import Row
from gristmill.worker.tools.compare.answers import count_common, find_choice, is_json
from gristmill.worker.tools.compare.pairs import Answer, Comparison, Pair, Scores
from gristmill.worker.tools.compare.rows import CompareRow
from gristmill.worker.tools.compare.sides import Side

INFO = EngineInfo("m.gguf", "float32", 256, 256, 10, 16, 8, 64, 0.1, "cpu", linear_bits=4.5)


def build_answer(text: str, num_prompt: int = 5, choices: Sequence[str] = ()) -> Answer:
    """An answer whose tokens are its characters."""
    ids = array("I", map(ord, text))
    return Answer(text, array("I", range(num_prompt)), ids, "stop", find_choice(text, choices), is_json(text))


def build_pair(
    a: str,
    b: str,
    *,
    index: int = 0,
    language: str = "en",
    prompt: str = "a prompt",
    num_prompt: int = 5,
    choices: Sequence[str] = (),
    scores: Scores | None = None,
) -> Pair:
    row = CompareRow(Row(0, index, {}), prompt, language)
    first, second = (build_answer(text, num_prompt, choices) for text in (a, b))
    parted = None if a == b else count_common(first.token_ids, second.token_ids)
    return Pair(row, first, second, None, parted, scores)


def build_failed(index: int, error: str) -> Pair:
    return Pair(CompareRow(Row(0, index, {}), "", "unknown"), error=error)


def build_scores(a_under_a: float, a_under_b: float, kl: Sequence[float]) -> Scores:
    return Scores(a_under_a, a_under_b, -4.0, -2.0, np.array(kl, np.float32))


def build_comparison(pairs: Sequence[Pair], choices: tuple[str, ...] = (), **changes: object) -> Comparison:
    sides = (Side("A", "m.gguf", {}), Side("B", "m.gguf", {"quantization": "int4"}))
    values: dict[str, object] = {
        "sides": sides, "infos": (INFO, INFO), "pairs": pairs, "choices": choices, "max_tokens": 8,
        "unscored": None, "num_unlike_prompts": 0,
    }  # fmt: skip
    return Comparison(**(values | changes))  # type: ignore[arg-type]
