"""Chooses the next token of each row from its own logits, parameters and seed, and nothing else.

Greedy rows take the argmax. Others draw one uniform number from a hash of (seed, position) and invert the cumulative
distribution, so that a retry, another batch or another worker draws the same token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import SamplingParams
from engine.sequence import Sequence


def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """One token id per row. logits: [num_rows, vocab_size]; may be changed in place."""
    for row, sequence in enumerate(sequences):
        if _has_penalties(sequence.request.sampling):
            _apply_penalties(logits[row], sequence)
    params = [s.request.sampling for s in sequences]
    tokens = np.empty(len(sequences), dtype=np.int64)
    for kind, choose in (
        ("greedy", _argmax),
        ("plain", _draw_plain),
        ("top_k", _draw_sorted),
        ("sorted", _draw_sorted),
    ):
        rows = [i for i, p in enumerate(params) if _kind(p) == kind]
        if rows:
            picked = logits if len(rows) == len(params) else logits[torch.tensor(rows)]
            tokens[rows] = choose(picked, [sequences[i] for i in rows])
    return [int(t) for t in tokens]


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


def _kind(p: SamplingParams) -> str:
    """Which path a row takes: its own parameters decide, never its neighbours'."""
    if p.temperature == 0.0:
        return "greedy"
    if p.top_k > 0:
        return "top_k"
    return "plain" if p.top_p >= 1.0 and p.min_p <= 0.0 else "sorted"


def _has_penalties(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _apply_penalties(row: Tensor, sequence: Sequence) -> None:
    """Repetition (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency (OpenAI) over the output."""
    p = sequence.request.sampling
    ids = np.array(sequence.token_ids, dtype=np.int64)
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(ids))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    generated, counts = np.unique(ids[sequence.num_prompt_tokens :], return_counts=True)
    if len(generated):
        penalty = p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(row.dtype)
        row[torch.from_numpy(generated)] -= penalty


def _argmax(logits: Tensor, sequences: list[Sequence]) -> NDArray[np.int64]:
    return logits.argmax(-1).numpy()


def _draw_plain(logits: Tensor, sequences: list[Sequence]) -> NDArray[np.int64]:
    """From the whole distribution: no sort."""
    cumulative = _probabilities(logits, sequences).double().cumsum(-1)
    target = _uniforms(sequences) * cumulative[:, -1]
    picked = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
    return picked.clamp_(max=logits.shape[-1] - 1).numpy()


def _draw_sorted(logits: Tensor, sequences: list[Sequence]) -> NDArray[np.int64]:
    """From what top-k, then top-p, then min-p leave; each keeps a head of the sorted distribution."""
    params = [s.request.sampling for s in sequences]
    vocab_size = logits.shape[-1]
    top_k = torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params])
    probabilities, ids = _probabilities(logits, sequences).topk(int(top_k.max()), -1)
    rank = torch.arange(probabilities.shape[-1])
    probabilities = probabilities.double().masked_fill_(rank >= top_k.unsqueeze(-1), 0.0)
    cumulative = probabilities.cumsum(-1)
    before = (cumulative - probabilities) / cumulative[:, -1:]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(-1)
    floor = torch.tensor([p.min_p for p in params], dtype=torch.float64).unsqueeze(-1) * probabilities[:, :1]
    kept = (before < top_p) & (probabilities >= floor) & (rank < top_k.unsqueeze(-1))
    last = kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    target = _uniforms(sequences).unsqueeze(-1) * cumulative.gather(1, last)
    picked = torch.minimum(torch.searchsorted(cumulative, target, right=True), last)
    return ids.gather(1, picked).squeeze(-1).numpy()


def _probabilities(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    temperature = torch.tensor([s.request.sampling.temperature for s in sequences]).unsqueeze(-1)
    return (logits.float() / temperature).softmax(-1)


def _uniforms(sequences: list[Sequence]) -> Tensor:
    seeds = np.array([s.request.seed & 0xFFFFFFFFFFFFFFFF for s in sequences], dtype=np.uint64)
    positions = np.array([s.num_output_tokens for s in sequences], dtype=np.uint64)
    return torch.from_numpy(uniform(seeds, positions))
