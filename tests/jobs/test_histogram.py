"""Histograms and stats: near enough, mergeable, and the same after JSON."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.jobs.histogram import Histogram
from gristmill.jobs.stats import JobStats, merge_stats

durations = st.lists(st.floats(min_value=1e-5, max_value=1e5), min_size=1, max_size=50)


def build_histogram(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(durations, st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_half_a_bucket_of_the_nearest_rank(values: list[float], q: float) -> None:
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert build_histogram(values).quantile(q) == pytest.approx(exact, rel=0.046)


@given(durations, durations)
def test_merging_equals_recording_everything_in_one(first: list[float], second: list[float]) -> None:
    merged = build_histogram(first)
    merged.merge(build_histogram(second))
    assert merged == build_histogram(first + second)
    assert merged.count == len(first) + len(second)


@given(durations)
def test_a_histogram_survives_its_list(values: list[float]) -> None:
    histogram = build_histogram(values)
    assert Histogram.from_list(histogram.to_list()) == histogram


def test_an_empty_histogram_has_no_quantiles() -> None:
    assert Histogram().quantile(0.5) is None


def test_zero_and_clock_noise_count_as_zero() -> None:
    histogram = build_histogram([0.0, -0.001, 0.0])
    assert (histogram.count, histogram.quantile(0.99)) == (3, 0.0)


def test_a_quantile_outside_0_to_1_is_refused() -> None:
    with pytest.raises(ValueError, match="not at 50"):
        Histogram().quantile(50)


def build_stats(code: str, waited: float) -> JobStats:
    stats = JobStats(
        num_preemptions=2,
        scheduled_tokens_while_waiting=300,
        budget_tokens_while_waiting=400,
        kv_waste_sum=0.5,
        kv_waste_samples=5,
        busy_s=1.5,
    )
    stats.record_error(code)
    stats.record_latency(waited, waited, 0.0)
    return stats


def test_stats_survive_json_and_merge() -> None:
    texts = [build_stats("null_value", 1.0).to_json(), None, build_stats("empty_prompt", 2.0).to_json()]
    total = merge_stats(texts)
    assert total.errors_by_code == {"null_value": 1, "empty_prompt": 1}
    assert (total.num_preemptions, total.busy_s) == (4, 3.0)
    assert (total.kv_waste, total.step_budget_utilization) == (0.1, 0.75)
    assert JobStats.from_json(total.to_json()) == total
    assert JobStats.from_json(None) == JobStats()


def test_a_row_of_one_token_has_no_time_per_token() -> None:
    percentiles = build_stats("null_value", 1.0).percentiles()
    assert percentiles["time_per_token_s"] == {"p50": None, "p95": None, "p99": None}
    assert percentiles["queue_wait_s"]["p50"] == pytest.approx(1.0, rel=0.05)


def test_shares_of_nothing_are_unknown() -> None:
    assert (JobStats().kv_waste, JobStats().step_budget_utilization) == (None, None)
