"""Chooses the next token of each row from its own logits, parameters and seed, and nothing else.

Greedy rows take the argmax. Others draw one uniform number from a hash of (seed, position) and invert the cumulative
distribution, so that a retry, another batch or another worker draws the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.batch.sequence import Slots
from gristmill.engine.request import GREEDY, PLAIN, SORTED, TOP_K, SamplingParams


@dataclass(frozen=True, slots=True)
class PenalizedRow:
    """A row of the logits that its sequence's earlier tokens change."""

    row: int
    sampling: SamplingParams
    token_ids: NDArray[np.int32]  # prompt and output
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of the logits is sampled. position: output tokens so far. Both [num_rows]."""

    params: NDArray[np.void]  # of SAMPLING_DTYPE
    position: NDArray[np.int64]
    penalized: tuple[PenalizedRow, ...] = ()

    def take(self, rows: NDArray[np.int64]) -> SamplingRows:
        """Some of the rows, without their penalties."""
        return SamplingRows(self.params[rows], self.position[rows])

    def column(self, name: str) -> Tensor:
        """One parameter of all rows. [num_rows, 1]"""
        return torch.from_numpy(self.params[name].copy()).unsqueeze(-1)


def sampling_rows(slots: Slots, chosen: NDArray[np.int64]) -> SamplingRows | None:
    """The rows of these slots; None where all are greedy and nothing changes their logits."""
    params = slots.sampling[chosen]
    if not (params["kind"].any() or slots.has_penalties[chosen].any()):
        return None
    penalized = tuple(
        PenalizedRow(
            int(row),
            slots[int(chosen[row])].request.sampling,
            slots[int(chosen[row])].token_ids,
            int(slots.num_prompt[chosen[row]]),
        )
        for row in np.flatnonzero(slots.has_penalties[chosen])
    )
    return SamplingRows(params, slots.num_tokens[chosen] - slots.num_prompt[chosen], penalized)


def sample(
    logits: Tensor, rows: SamplingRows | None, argmax: Callable[[Tensor], Tensor] = lambda x: x.argmax(-1)
) -> NDArray[np.int64]:
    """One token id per row. logits: [num_rows, vocab_size]; may be changed in place. rows: of sampling_rows."""
    if rows is None:
        return argmax(logits).numpy()
    for penalized in rows.penalized:
        _apply_penalties(logits[penalized.row], penalized)
    kinds = rows.params["kind"]
    tokens = np.empty(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds).tolist():
        chosen = np.flatnonzero(kinds == kind)
        picked = logits if len(chosen) == len(tokens) else logits[torch.from_numpy(chosen)]
        if kind == GREEDY:
            tokens[chosen] = argmax(picked).numpy()
        elif kind == PLAIN:
            tokens[chosen] = _draw_plain(picked, rows.take(chosen))
        else:
            assert kind in (TOP_K, SORTED)
            tokens[chosen] = _draw_sorted(picked, rows.take(chosen))
    return tokens


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each (seed, position): two rounds of splitmix64 (Steele et al., 2014)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _apply_penalties(row: Tensor, penalized: PenalizedRow) -> None:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency (OpenAI) over the output."""
    p = penalized.sampling
    ids = penalized.token_ids.astype(np.int64)
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(ids))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    generated, counts = np.unique(ids[penalized.num_prompt_tokens :], return_counts=True)
    if len(generated):
        penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
        row[torch.from_numpy(generated)] -= penalty


def _draw_plain(logits: Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """From the whole distribution: no sort."""
    cumulative = _probabilities(logits, rows).double().cumsum(-1)
    target = _uniforms(rows) * cumulative[:, -1]
    picked = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return picked.clamp_(max=logits.shape[-1] - 1).numpy()


def _draw_sorted(logits: Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """From what top-k, then top-p, then min-p leave; each keeps a head of the sorted distribution."""
    vocab_size = logits.shape[-1]
    top_k = rows.column("top_k")
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
    probabilities, ids = _probabilities(logits, rows).topk(int(top_k.max()), -1)
    rank = torch.arange(probabilities.shape[-1])
    probabilities = probabilities.double().masked_fill_(rank >= top_k, 0.0)
    cumulative = probabilities.cumsum(-1)
    before = (cumulative - probabilities) / cumulative[:, -1:]
    floor = rows.column("min_p") * probabilities[:, :1]
    kept = (before < rows.column("top_p")) & (probabilities >= floor) & (rank < top_k)
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    target = _uniforms(rows).unsqueeze(-1) * cumulative.gather(1, last)
    picked = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return ids.gather(1, picked).squeeze(-1).numpy()


def _probabilities(logits: Tensor, rows: SamplingRows) -> Tensor:
    return (logits.float() / rows.column("temperature").float()).softmax(-1)


def _uniforms(rows: SamplingRows) -> Tensor:
    return torch.from_numpy(uniform(rows.params["seed"], rows.position.astype(np.uint64)))
