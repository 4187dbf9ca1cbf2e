"""How much text the prompts of a job share, in the order of the input and sorted, estimated from a sample.

The sample is made of windows: contiguous rows, as many as an engine has before it at once. All prompts form a tree;
at each depth, the rows of a window that have the same text up to there compute it once in that window, and once
in the whole job where rows are sorted. How many windows share a text in the whole job is known from the sample if
that has every window; else it is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NUM_DEPTHS = 128


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Fractions of the prompt text that need no computing, and the mean size of a prompt in bytes."""

    in_order: float
    sorted: float
    prompt_bytes: float

    @property
    def gain(self) -> float:
        """What sorting adds, as a fraction of the prompt text."""
        return self.sorted - self.in_order


def estimate_sharing(windows: Sequence[Sequence[bytes]], sampled_fraction: float) -> PrefixSharing:
    """The sharing in a job of which these windows are a sample; sampled_fraction 1.0: they are all of it."""
    prompts = sorted((prompt, index) for index, window in enumerate(windows) for prompt in window)
    if not prompts:
        return PrefixSharing(0.0, 0.0, 0.0)
    lengths = np.array([len(prompt) for prompt, _ in prompts])
    window_of = np.array([index for _, index in prompts])
    shared = np.zeros(len(prompts), np.int64)  # with the prompt before
    for i in range(1, len(prompts)):
        shared[i] = common_prefix_size(prompts[i - 1][0], prompts[i][0])
    num_windows = len(windows)
    other_fraction = 1.0
    if sampled_fraction < 1.0:
        other_fraction = max(num_windows - 1, 1) / max(num_windows / sampled_fraction - 1, 1)
    depths = np.unique(np.concatenate([shared, lengths]))
    depths = depths[depths > 0]
    if len(depths) > _NUM_DEPTHS:
        depths = depths[np.linspace(0, len(depths) - 1, _NUM_DEPTHS).astype(np.int64)]
    saved_in_order = saved_sorted = 0.0
    before = 0
    for depth in depths.tolist():
        counts = _count_windows(shared, lengths, window_of, num_windows, depth)
        num_rows, num_computed = int((lengths >= depth).sum()), int(counts.sum())
        in_order = num_rows - num_computed
        saved_in_order += (depth - before) * in_order
        saved_sorted += (depth - before) * (in_order + num_computed * _share_between(counts, other_fraction))
        before = depth
    total = float(lengths.sum())
    return PrefixSharing(saved_in_order / total, saved_sorted / total, total / len(prompts))


def common_prefix_size(left: bytes, right: bytes) -> int:
    """How many bytes both begin with."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    low, step = 0, 64
    while low + step < size and left[low : low + step] == right[low : low + step]:
        low, step = low + step, step * 2
    high = min(size, low + step)
    while high - low > 1:  # they are equal up to `low`, and differ before `high`
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _count_windows(
    shared: NDArray[np.int64],
    lengths: NDArray[np.int64],
    window_of: NDArray[np.int64],
    num_windows: int,
    depth: int,
) -> NDArray[np.int64]:
    """For each text of `depth` bytes that prompts begin with: in how many windows it is."""
    text_of = np.cumsum(shared < depth)
    is_long = lengths >= depth
    pairs = np.unique(text_of[is_long] * num_windows + window_of[is_long])
    return np.unique(pairs // num_windows, return_counts=True)[1]


def _share_between(counts: NDArray[np.int64], other_fraction: float) -> float:
    """The fraction of (text, window) pairs that would be saved if each text were computed once in the whole job.

    Seen from one pair, the sample holds `other_fraction` of the windows that may have its text too. Two kinds of
    texts are assumed: a part p is in m other windows each, the rest in one window only. From a sample that meets
    p * (1 - exp(-x)) pairs with at least one partner and p * x partners a pair, x = m * other_fraction, both are
    found; the saved fraction is p * m / (m + 1), and at least what the sample itself saves.
    """
    num_pairs = int(counts.sum())
    seen = 1.0 - len(counts) / num_pairs
    if other_fraction >= 1.0:
        return seen
    has_partner = float(counts[counts > 1].sum()) / num_pairs
    num_partners = float((counts * (counts - 1)).sum()) / num_pairs
    if has_partner == 0.0:
        return seen
    x = max(_solve(has_partner / num_partners), num_partners)  # p is at most 1
    m = x / other_fraction
    return max(seen, num_partners / x * m / (m + 1.0))


def _solve(ratio: float) -> float:
    """The x with (1 - exp(-x)) / x = ratio, for a ratio of at most 1."""
    low, high = 1e-9, 1.0 / ratio
    for _ in range(50):
        middle = (low + high) / 2
        if -math.expm1(-middle) / middle > ratio:
            low = middle
        else:
            high = middle
    return high
