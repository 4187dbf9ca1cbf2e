"""How likely given answers are to a model: teacher forcing through an engine's own model, with a KV cache of its own.

What is judged is what generates: the packed (quantized) weights and the engine's kind of KV cache. Nothing is sampled,
and the engine's own rows and cache are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.engine import Engine
from gristmill.kernels.contract import AttentionBatch

MAX_LOGIT_ROWS = 64  # two models' logits of so many tokens are in memory: 64 x 49,152 float32 are 13 MB

Floats = NDArray[np.float32]


class Forced(NamedTuple):
    """A prompt and the answer that is held to be given to it; neither is empty."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Tokens that run: the answer's last one predicts nothing that is asked."""
        return len(self.prompt_ids) + len(self.answer_ids) - 1


@dataclass(frozen=True, slots=True)
class Contrast:
    """One answer under two models, token by token: [num_answer_tokens] float32 each.

    kl: KL(first || second) of the distributions at each place, in nats.
    """

    first_logprobs: Floats
    second_logprobs: Floats
    kl: Floats


class Scorer:
    """Runs answers that are given. max_tokens: of the longest row; shorter ones run together, up to a step's budget."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._model = engine.runner.model
        self._step_tokens = engine.info.max_num_batched_tokens
        self.max_tokens = -(-max(max_tokens, self._step_tokens) // BLOCK_SIZE) * BLOCK_SIZE
        self._cache = engine.runner.cache.like(self.max_tokens // BLOCK_SIZE)

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Forced]) -> Tensor:
        """Hidden states [num_answer_tokens of all rows, hidden_size] that predict the answers' tokens, row after row.

        The rows' tokens, each row's rounded up to blocks, are at most `max_tokens`.
        """
        layout = _build_layout(rows)
        assert layout.num_blocks <= self._cache.num_blocks, f"{layout.num_blocks} blocks of rows"
        num_tokens = len(layout.token_ids)
        found = [
            self._step(layout, start, min(start + self._step_tokens, num_tokens))
            for start in range(0, num_tokens, self._step_tokens)
        ]
        return torch.cat(found)

    @torch.inference_mode()
    def log_softmax(self, hidden: Tensor) -> Tensor:
        """[n, vocab_size] float32 of hidden: [n, hidden_size], n at most MAX_LOGIT_ROWS."""
        return torch.log_softmax(self._model.logits(hidden).float(), -1)

    def _step(self, layout: _Layout, start: int, stop: int) -> Tensor:
        """One forward pass over tokens start:stop of the layout; the hidden states that are asked for."""
        rows, positions = layout.rows[start:stop], layout.positions[start:stop]
        first, last = int(rows[0]), int(rows[-1])
        counts = np.bincount(rows - first, minlength=last - first + 1)
        ends = np.cumsum(counts)
        tables = layout.tables[first : last + 1]
        batch = AttentionBatch(
            query_start_loc=np.concatenate([[0], ends]),
            seq_lens=positions[ends - 1] + 1,
            block_tables=tables,
            sliding_window=self._model.config.sliding_window,
        )
        step = self._model.build_input(layout.token_ids[start:stop], batch, self._cache)
        hidden = self._model.forward(step, self._cache)
        return hidden[torch.from_numpy(layout.is_asked[start:stop])]


def score(engine: Engine, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Floats:
    """The log-probability of each of the answer's tokens after the prompt: [len(answer_ids)] float32."""
    row = Forced(prompt_ids, answer_ids)
    scorer = Scorer(engine, row.num_tokens)
    hidden, targets = scorer.hidden([row]), _to_tensor(answer_ids)
    pieces = zip(hidden.split(MAX_LOGIT_ROWS), targets.split(MAX_LOGIT_ROWS), strict=True)
    found: Floats = torch.cat([_pick(scorer.log_softmax(h), t) for h, t in pieces]).numpy()
    return found


def contrast(first: Scorer, second: Scorer, rows: Sequence[tuple[Forced, Forced]]) -> Iterator[Contrast]:
    """Each pair's answer under both models, in order. A pair: the same answer after either model's own prompt.

    Both models have the same vocabulary. Their logits are made for MAX_LOGIT_ROWS tokens at a time.
    """
    sizes = [max(a.num_tokens, b.num_tokens) for a, b in rows]
    for batch in plan_batches(sizes, min(first.max_tokens, second.max_tokens)):
        yield from _contrast_batch(first, second, rows[batch])


def plan_batches(sizes: Sequence[int], max_tokens: int) -> list[slice]:
    """Neighbouring rows whose tokens, rounded up to blocks, fit together into max_tokens. Each row alone fits."""
    batches: list[slice] = []
    start, used = 0, 0
    for index, size in enumerate(sizes):
        size = -(-size // BLOCK_SIZE) * BLOCK_SIZE
        assert size <= max_tokens, f"a row of {size} tokens, at most {max_tokens}"
        if used + size > max_tokens:
            batches.append(slice(start, index))
            start, used = index, 0
        used += size
    return [*batches, slice(start, len(sizes))] if sizes else []


@dataclass(frozen=True, slots=True)
class _Layout:
    """Rows laid out one after the other, each with blocks of its own."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    positions: NDArray[np.int64]  # [num_tokens]
    rows: NDArray[np.int64]  # [num_tokens], which row a token is of
    is_asked: NDArray[np.bool_]  # [num_tokens], whether it predicts a token of the answer
    tables: NDArray[np.int32]  # [num_rows, max_blocks]
    num_blocks: int


def _build_layout(rows: Sequence[Forced]) -> _Layout:
    sizes = np.array([row.num_tokens for row in rows])
    num_blocks = -(-sizes // BLOCK_SIZE)
    first_blocks = np.cumsum(num_blocks) - num_blocks
    steps = np.arange(num_blocks.max())
    positions = np.concatenate([np.arange(size) for size in sizes])
    row_of = np.repeat(np.arange(len(rows)), sizes)
    num_prompt = np.array([len(row.prompt_ids) for row in rows])
    ids = [token for row in rows for token in (*row.prompt_ids, *row.answer_ids[:-1])]
    return _Layout(
        token_ids=np.array(ids, np.int64),
        positions=positions,
        rows=row_of,
        is_asked=positions >= num_prompt[row_of] - 1,
        tables=np.where(steps < num_blocks[:, None], first_blocks[:, None] + steps, 0).astype(np.int32),
        num_blocks=int(num_blocks.sum()),
    )


@torch.inference_mode()
def _contrast_batch(first: Scorer, second: Scorer, rows: Sequence[tuple[Forced, Forced]]) -> list[Contrast]:
    answers = [row.answer_ids for row, _ in rows]
    targets = _to_tensor([token for answer in answers for token in answer])
    hidden = (first.hidden([a for a, _ in rows]), second.hidden([b for _, b in rows]))
    columns: list[list[Tensor]] = [[], [], []]
    pieces = (tensor.split(MAX_LOGIT_ROWS) for tensor in (*hidden, targets))
    for first_hidden, second_hidden, chosen in zip(*pieces, strict=True):
        p, q = first.log_softmax(first_hidden), second.log_softmax(second_hidden)
        kl = (p.exp() * (p - q)).sum(-1).clamp_(min=0.0)  # rounding alone can make it negative
        for column, values in zip(columns, (_pick(p, chosen), _pick(q, chosen), kl), strict=True):
            column.append(values)
    sizes = [len(answer) for answer in answers]
    parts = [[part.numpy() for part in torch.cat(column).split(sizes)] for column in columns]
    return [Contrast(*values) for values in zip(*parts, strict=True)]


def _pick(logprobs: Tensor, targets: Tensor) -> Tensor:
    """[n]: each row's value at its target. logprobs: [n, vocab_size]; targets: [n] int64."""
    return logprobs.gather(1, targets[:, None])[:, 0]


def _to_tensor(token_ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64)
