"""JobSpec: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.spec import JobSpec, SamplingSpec, parse_sampling, parse_spec

REPO = Path(__file__).resolve().parents[2]
REQUIRED = {"input": ["a.jsonl"], "output": "out", "model": "null:"}


def test_the_committed_schema_is_the_models_own() -> None:
    committed = json.loads((REPO / "schemas" / "job_spec.schema.json").read_text(encoding="utf-8"))
    assert committed == JobSpec.model_json_schema()


def test_the_defaults_are_greedy_and_strict() -> None:
    spec = parse_spec(REQUIRED)
    assert spec.sampling == SamplingSpec() and spec.sampling.temperature == 0.0
    assert (spec.on_null, spec.on_too_long, spec.max_tokens, spec.max_errors) == (
        "error",
        "error",
        None,
        None,
    )
    assert spec.stop == [] and spec.keep == []


def test_a_spec_survives_json() -> None:
    spec = parse_spec(
        {**REQUIRED, "sampling": {"top_k": 5, "stop_token_ids": [1, 2]}, "keep": "a, b", "stop": "\n"}
    )
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.keep == ["a", "b"] and spec.stop == ["\n"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"promt": "x"}, ["promt is not an option", "prompt"]),
        ({"dtype": "f16"}, ["dtype is 'f16'", "bfloat16"]),
        ({"limit": 0}, ["limit is 0", "greater than"]),
        ({"prompt": "a", "messages": "b"}, ["prompt or messages, not both"]),
        ({"keep": "a,a"}, ["keep names a column twice"]),
        ({"max_errors": "many"}, ["max_errors is 'many'", "5%"]),
        ({"sampling": {"topk": 1}}, ["sampling.topk is not an option", "top_k"]),
        ({"sampling": {"temperature": -1}}, ["sampling.temperature is -1"]),
        ({"input": []}, ["input is []"]),
        ({"stop": [""]}, ["stop.0"]),
        ({"seed": 2**63}, ["seed is 9223372036854775808"]),
        ({"output": None}, ["output is None"]),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_spec({**REQUIRED, **fields})
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_a_missing_field_is_named() -> None:
    with pytest.raises(RefusedError, match="^model is required$"):
        parse_spec({"input": ["a"], "output": "o"})


def test_sampling_is_read_from_pairs() -> None:
    sampling = parse_sampling("temperature=0.7, top_k=40,stop_token_ids=[1,2],ignore_eos=true")
    assert sampling == SamplingSpec(temperature=0.7, top_k=40, stop_token_ids=[1, 2], ignore_eos=True)
    assert parse_sampling("stop_token_ids=7").stop_token_ids == [7]
    assert parse_sampling("") == parse_sampling(None) == SamplingSpec()
    assert parse_sampling('{"min_p": 0.1}').min_p == 0.1


def test_sampling_is_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"top_p": 0.5}')
    (tmp_path / "s.toml").write_text("top_p = 0.5\n")
    assert parse_sampling(str(tmp_path / "s.json")) == parse_sampling(str(tmp_path / "s.toml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temp=1", ["sampling.temp is not an option", "temperature", "top_p"]),
        ("temperature=hot", ["sampling.temperature", "'hot'", "number"]),
        ("temperature=nan", ["sampling.temperature", "finite"]),
        ("top_k=1.5", ["sampling.top_k"]),
        ("top_p", ["'top_p' is not k=v", "temperature"]),
        ("top_p=1,top_p=1", ["given twice"]),
        ("nope.json", ["nope.json", "can't read"]),
        ("{", ["not valid JSON"]),
    ],
)
def test_a_sampling_fault_names_the_key_and_the_keys_that_exist(text: str, words: list[str]) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_sampling(text)
    for word in words:
        assert word in str(caught.value)


def test_identity_fields_hold_what_can_change_a_row_and_nothing_else() -> None:
    base = parse_spec(REQUIRED).identity_fields()
    same = {
        "output": "x",
        "dtype": "float32",
        "max_errors": "5%",
        "if_exists": "fail",
        "shard_rows": 7,
        "input": "b",
    }
    assert parse_spec({**REQUIRED, **same}).identity_fields() == base
    for change in (
        {"prompt": "x"},
        {"system": "x"},
        {"seed": 1},
        {"stop": ["x"]},
        {"max_tokens": 3},
        {"sampling": {"temperature": 1}},
        {"keep": ["a"]},
        {"limit": 5},
        {"on_null": "skip"},
        {"on_too_long": "truncate-left"},
        {"output_format": "jsonl"},
    ):
        assert parse_spec({**REQUIRED, **change}).identity_fields() != base


def test_max_errors_is_rows_or_a_share() -> None:
    assert parse_spec({**REQUIRED, "max_errors": 10}).max_num_errors(1000) == 10
    assert parse_spec({**REQUIRED, "max_errors": "0.5%"}).max_num_errors(1000) == 5
    assert parse_spec(REQUIRED).max_num_errors(1000) is None
