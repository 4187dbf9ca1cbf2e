"""A histogram of durations that can be merged over shards and kept as a short JSON list.

Buckets are logarithmic, eight to each doubling (9% wide), so a quantile is within 4.5% of the true value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

BUCKETS_PER_DOUBLING = 8
MIN_VALUE = 1e-6  # smaller values, and zero, share the first bucket
_FIRST_BUCKET = math.floor(math.log2(MIN_VALUE) * BUCKETS_PER_DOUBLING)


@dataclass(slots=True)
class Histogram:
    """Counts of values by bucket. Mutable: one writer records, then the copies are merged."""

    _counts: dict[int, int] = field(default_factory=dict)

    def record(self, value: float, count: int = 1) -> None:
        """Counts `value`, in seconds; negative values are clock noise and count as zero."""
        if value > MIN_VALUE:
            bucket = math.floor(math.log2(value) * BUCKETS_PER_DOUBLING)
        else:
            bucket = _FIRST_BUCKET
        self._counts[bucket] = self._counts.get(bucket, 0) + count

    def merge(self, other: Histogram) -> None:
        """Adds the counts of `other`."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return sum(self._counts.values())

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` of the values lies (nearest rank); None when there are none."""
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return 0.0 if bucket == _FIRST_BUCKET else _bucket_middle(bucket)
        return None

    def to_list(self) -> list[int]:
        """[bucket, count, bucket, count, ...] in bucket order."""
        return [number for bucket in sorted(self._counts) for number in (bucket, self._counts[bucket])]

    @classmethod
    def from_list(cls, numbers: Iterable[int]) -> Histogram:
        """The inverse of to_list."""
        pairs = iter(numbers)
        return cls(dict(zip(pairs, pairs, strict=True)))

    def negated(self) -> Histogram:
        """What takes these counts out of a sum again, once merged into it."""
        return Histogram({bucket: -count for bucket, count in self._counts.items()})


def _bucket_middle(bucket: int) -> float:
    return float(2.0 ** ((bucket + 0.5) / BUCKETS_PER_DOUBLING))
