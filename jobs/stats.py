"""What a shard's work cost: errors by code, engine counters and three latency histograms.

Row and token counts are not here: they are columns of the shards table (ShardCounts), for SQL to add.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from gristmill.jobs.histogram import Histogram

PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_SUMS = (
    "num_preemptions",
    "scheduled_tokens_while_waiting",
    "budget_tokens_while_waiting",
    "kv_waste_sum",
    "kv_waste_samples",
    "busy_s",
)
_COUNTS = ("errors_by_code", "finish_reasons")
_HISTOGRAMS = ("queue_wait_s", "time_to_first_token_s", "time_per_token_s")


@dataclass(slots=True)
class ShardCounts:
    """Rows and tokens: what one commit adds to its shard. Mutable while recording."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def rows(self) -> int:
        """Rows that have a result."""
        return self.completed + self.failed + self.skipped

    def add(self, other: ShardCounts) -> None:
        """Adds the counts of `other`."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(slots=True)
class JobStats:
    """Sums and histograms over some rows; merged over shards, those of the job. Mutable while recording."""

    errors_by_code: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)  # of completed rows
    num_preemptions: int = 0
    scheduled_tokens_while_waiting: int = 0
    budget_tokens_while_waiting: int = 0
    kv_waste_sum: float = 0.0
    kv_waste_samples: int = 0
    busy_s: float = 0.0  # wall time during which the engine worked on these rows
    queue_wait_s: Histogram = field(default_factory=Histogram)
    time_to_first_token_s: Histogram = field(default_factory=Histogram)
    time_per_token_s: Histogram = field(default_factory=Histogram)

    def record_latency(
        self, queue_wait_s: float, time_to_first_token_s: float, time_per_token_s: float
    ) -> None:
        """Counts one completed row; a row of a single token has no time per token (0: not counted)."""
        self.queue_wait_s.record(queue_wait_s)
        self.time_to_first_token_s.record(time_to_first_token_s)
        if time_per_token_s > 0.0:
            self.time_per_token_s.record(time_per_token_s)

    def record_error(self, code: str) -> None:
        """Counts one error row."""
        _add(self.errors_by_code, code, 1)

    def record_finish(self, reason: str) -> None:
        """Counts one completed row by what ended it."""
        _add(self.finish_reasons, reason, 1)

    def merge(self, other: JobStats) -> None:
        """Adds what `other` counted; its counts may be negative, and a count that comes to zero is dropped."""
        for name in _COUNTS:
            for key, count in getattr(other, name).items():
                _add(getattr(self, name), key, count)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            getattr(self, name).merge(getattr(other, name))

    def negated(self) -> JobStats:
        """What takes these stats out of a sum again, once merged into it."""
        negative = JobStats()
        for name in _COUNTS:
            getattr(negative, name).update({key: -count for key, count in getattr(self, name).items()})
        for name in _SUMS:
            setattr(negative, name, -getattr(self, name))
        for name in _HISTOGRAMS:
            setattr(negative, name, getattr(self, name).negated())
        return negative

    def percentiles(self) -> dict[str, dict[str, float | None]]:
        """{"queue_wait_s": {"p50": .., "p95": .., "p99": ..}, and likewise the other two}."""
        return {
            name: {label: getattr(self, name).quantile(q) for label, q in PERCENTILES.items()}
            for name in _HISTOGRAMS
        }

    @property
    def kv_waste(self) -> float | None:
        """Mean share of allocated KV slots that held no token; None when it was never sampled."""
        return self.kv_waste_sum / self.kv_waste_samples if self.kv_waste_samples else None

    @property
    def step_budget_utilization(self) -> float | None:
        """Share of the token budget that steps used while rows waited; None when rows never waited."""
        if not self.budget_tokens_while_waiting:
            return None
        return self.scheduled_tokens_while_waiting / self.budget_tokens_while_waiting

    def to_json(self) -> str:
        """Short JSON text with sorted keys; zeros and empty histograms are left out."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _SUMS}
        values.update({name: getattr(self, name) for name in _COUNTS})
        values.update({name: getattr(self, name).to_list() for name in _HISTOGRAMS})
        return json.dumps({k: v for k, v in values.items() if v}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | None) -> JobStats:
        """The inverse of to_json; None gives empty stats."""
        values: dict[str, Any] = json.loads(text) if text else {}
        stats = cls()
        for name in _COUNTS:
            getattr(stats, name).update(values.get(name, {}))
        for name in _SUMS:
            setattr(stats, name, values.get(name, getattr(stats, name)))
        for name in _HISTOGRAMS:
            setattr(stats, name, Histogram.from_list(values.get(name, ())))
        return stats


def merge_stats(texts: Iterable[str | None]) -> JobStats:
    """The sum of stats kept as JSON."""
    total = JobStats()
    for text in texts:
        total.merge(JobStats.from_json(text))
    return total


def _add(counts: dict[str, int], key: str, count: int) -> None:
    counts[key] = counts.get(key, 0) + count
    if counts[key] == 0:
        del counts[key]
