"""Which of the sampler's paths a row takes: its own parameters decide, never its neighbours'."""

from __future__ import annotations

from gristmill.engine.request import SamplingParams

GREEDY, PLAIN, TOP_K, SORTED = range(
    4
)  # PLAIN: the whole distribution; SORTED: all of it, in order of probability


def sampling_kind(p: SamplingParams) -> int:
    """GREEDY, PLAIN, TOP_K or SORTED."""
    if p.temperature == 0.0:
        return GREEDY
    if p.top_k > 0:
        return TOP_K
    return PLAIN if p.top_p >= 1.0 and p.min_p <= 0.0 else SORTED


def has_penalties(p: SamplingParams) -> bool:
    """Whether the row's earlier tokens change its logits."""
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
