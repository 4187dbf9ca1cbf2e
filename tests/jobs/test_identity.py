"""The identity of a job changes with what can change a text, and with nothing else; seeds likewise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gristmill.jobs.identity import job_identity, sample_seed
from gristmill.jobs.source import Source
from gristmill.jobs.spec import JobSpec

SOURCES = [Source("/a.jsonl", 10, "1", "jsonl"), Source("/b.jsonl", 20, "2", "jsonl")]


def build_spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"input": ["a"], "output": "out", "model": "null:", "prompt": "{{ x }}"} | fields
    )


SAME = job_identity(SOURCES, build_spec(), "model")


def test_a_jobs_identity_is_fixed_for_ever() -> None:
    every_field = {
        "system": "be", "max_tokens": 7, "sampling": {"temperature": 0.5, "top_k": 4, "stop_token_ids": [1]},
        "seed": -3, "stop": ["END", "."], "input_format": "jsonl", "output_format": "jsonl", "keep": ["a", "b"],
        "limit": 9, "on_null": "skip", "on_too_long": "truncate-left", "max_errors": "5%", "dtype": "float32",
        "quantization": "int8", "kv_dtype": "fp8", "if_exists": "fail", "shard_rows": 64, "regroup": "never",
        "priority": "high", "not_before": "30m", "deadline": "2h", "on_complete": "a.b@q",
    }  # fmt: skip
    assert SAME == "7e68d37d5d5d464b1bd5f7a2b050d883"
    whole = job_identity(SOURCES, build_spec(**every_field), "model")
    assert whole == "081b595b2c55f47b8c78c87ba7f97fb2"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "{{ y }}"},
        {"system": "Be brief"},
        {"max_tokens": 4},
        {"seed": 1},
        {"stop": ["x"]},
        {"limit": 3},
        {"keep": ["x"]},
        {"on_null": "empty"},
        {"sampling": {"temperature": 0.5}},
    ],
)
def test_another_text_is_another_job(fields: dict[str, Any]) -> None:
    assert job_identity(SOURCES, build_spec(**fields), "model") != SAME


@pytest.mark.parametrize("fields", [{"shard_rows": 10}, {"max_errors": "3"}, {"if_exists": "fail"}])
def test_how_the_work_is_cut_does_not_matter(fields: dict[str, Any]) -> None:
    assert job_identity(SOURCES, build_spec(**fields), "model") == SAME


@pytest.mark.parametrize("change", [{"uri": "/c.jsonl"}, {"size_bytes": 11}, {"version": "9"}])
def test_another_input_is_another_job(change: dict[str, Any]) -> None:
    assert job_identity([replace(SOURCES[0], **change), SOURCES[1]], build_spec(), "model") != SAME


def test_the_order_of_sources_does_not_matter_and_the_model_does() -> None:
    assert job_identity(SOURCES[::-1], build_spec(), "model") == SAME
    assert job_identity(SOURCES, build_spec(), "another") != SAME


def test_a_seed_depends_on_each_of_its_parts_and_is_fixed_for_ever() -> None:
    seeds = {sample_seed(0, 0, 0), sample_seed(1, 0, 0), sample_seed(0, 1, 0), sample_seed(0, 0, 1)}
    seeds |= {sample_seed(0, 0, 0, 1), sample_seed(0, 1, 11), sample_seed(0, 11, 1), sample_seed(-1, 0, 0)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(42, 0, 7) == 5_593_007_081_716_170_993
