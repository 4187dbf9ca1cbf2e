"""What a comparison finds: each row's two answers and what either model makes of them. Values only; no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gristmill.engine.request import EngineInfo
from gristmill.worker.tools.compare.rows import CompareRow
from gristmill.worker.tools.compare.sides import Side


@dataclass(frozen=True, slots=True)
class Answer:
    """What one side made of a row. token_ids: the end of text too, where it ended the answer."""

    text: str
    prompt_ids: array[int]
    token_ids: array[int]
    finish_reason: str
    choice: str | None
    is_json: bool


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums of log-probabilities over the answers' tokens, in nats, and KL(A || B) of each token of A's answer."""

    a_under_a: float
    a_under_b: float
    b_under_a: float
    b_under_b: float
    kl: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pair:
    """One row's two answers. `error` instead where either side could not run it; skipped rows have one too.

    first_divergence: tokens that the answers begin with alike; None where their texts are the same.
    """

    row: CompareRow
    a: Answer | None = None
    b: Answer | None = None
    error: str | None = None
    first_divergence: int | None = None
    scores: Scores | None = None

    @property
    def is_same(self) -> bool:
        return self.a is not None and self.b is not None and self.a.text == self.b.text


@dataclass(frozen=True, slots=True)
class Comparison:
    """All pairs, in input order, and what ran. unscored: why there are no probabilities; None: there are."""

    sides: tuple[Side, Side]
    infos: tuple[EngineInfo, EngineInfo]
    pairs: Sequence[Pair]
    choices: tuple[str, ...]
    max_tokens: int | None
    unscored: str | None
    num_unlike_prompts: int  # rows whose prompts the sides' templates make different tokens of
