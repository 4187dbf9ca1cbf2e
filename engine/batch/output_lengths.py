"""How long the outputs of a job's rows are, learned from the rows that have ended.

A prediction is a quantile of the lengths seen, among those longer than what the row has already written. The quantile
corrects itself: each preemption shows that rows were taken for too short and raises it; each end lowers it a little.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ASSUMED_TOKENS = 64  # of a row, until enough rows have ended
MIN_SAMPLES = 8
MAX_SAMPLES = 1024  # the latest ones
MIN_QUANTILE, MAX_QUANTILE = 0.6, 0.98
_RAISE = 0.5  # of what is missing to MAX_QUANTILE, at a preemption
_LOWER = 0.002  # of what is over MIN_QUANTILE, at an end


class OutputLengths:
    """The lengths of one group of requests."""

    def __init__(self) -> None:
        self.quantile = MIN_QUANTILE
        self._ring = np.zeros(MAX_SAMPLES, np.int64)
        self._num_seen = 0
        self._sorted: NDArray[np.int64] | None = None

    def note_end(self, num_tokens: int) -> None:
        """A row ended after so many tokens."""
        self._ring[self._num_seen % MAX_SAMPLES] = num_tokens
        self._num_seen += 1
        self._sorted = None
        self.quantile -= _LOWER * (self.quantile - MIN_QUANTILE)

    def note_preemption(self) -> None:
        """Memory ran out: rows were expected to be shorter than they are."""
        self.quantile += _RAISE * (MAX_QUANTILE - self.quantile)

    def predict(self, written: NDArray[np.int64]) -> NDArray[np.int64]:
        """The expected lengths of rows that have written so many tokens: more than that, always."""
        if self._num_seen < MIN_SAMPLES:
            return np.maximum(ASSUMED_TOKENS, written * 2)
        if self._sorted is None:
            self._sorted = np.sort(self._ring[: min(self._num_seen, MAX_SAMPLES)])
        shorter = np.searchsorted(self._sorted, written, side="right")
        longer = len(self._sorted) - shorter
        index = shorter + (longer * self.quantile).astype(np.int64)
        seen = self._sorted[np.minimum(index, len(self._sorted) - 1)]
        return np.where(longer >= MIN_SAMPLES, seen, np.maximum(seen, written * 3 // 2 + 1))
