"""Rows become requests with the right tokens and seeds, or error results that say why; none is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import NullTokenizer
from gristmill.jobs.identity import sample_seed
from gristmill.jobs.input.reading import load_columns
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.spec import parse_spec
from gristmill.jobs.storage.folder import open_storage
from gristmill.worker.run.prepare import PreparedBatch, Preparer


def _info(context_size: int = 128, max_request_tokens: int = 1 << 20) -> EngineInfo:
    return EngineInfo("null:", "float32", context_size, max_request_tokens, 100, 16, 8, 64, 0.0, "cpu")


def _prepare(
    folder: Path,
    lines: Sequence[str],
    info: EngineInfo | None = None,
    done_rows: Sequence[int] = (),
    **fields: Any,
) -> PreparedBatch:
    path = folder / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    spec = parse_spec(
        {
            "input": [str(path)],
            "output": str(folder / "out"),
            "model": "null:",
            "prompt": "{{ text }}",
            **fields,
        }
    )
    sources = load_sources(spec.input)
    preparer = Preparer(
        spec,
        sources,
        NullTokenizer(),
        PromptSource(spec, load_columns(sources)),
        info or _info(),
        spec.keep,
    )
    whole = PreparedBatch([], {}, [])
    for shard in plan_shards(sources).shards:
        for batch in preparer.prepare(shard, {(0, row) for row in done_rows}, open_storage(spec.output)):
            whole.requests.extend(batch.requests)
            whole.pending.update(batch.pending)
            whole.results.extend(batch.results)
    return whole


def _texts(batch: PreparedBatch) -> list[str]:
    return [bytes(request.prompt_token_ids.tolist()).decode() for request in batch.requests]


def test_a_row_becomes_a_request_with_its_own_seed(tmp_path: Path) -> None:
    batch = _prepare(tmp_path, ['{"text": "a"}', '{"text": "bc"}'], seed=7, max_tokens=3)
    assert _texts(batch) == ["a", "bc"]
    assert [request.seed for request in batch.requests] == [sample_seed(7, 0, 0), sample_seed(7, 0, 1)]
    assert batch.requests[0].sampling.max_tokens == 3
    assert [row.row_index for row in batch.pending.values()] == [0, 1]
    assert batch.results == []


def test_the_rows_of_a_job_are_one_group_and_other_jobs_are_others(tmp_path: Path) -> None:
    first = _prepare(tmp_path, ['{"text": "a"}', '{"text": "b"}'])
    second = _prepare(tmp_path, ['{"text": "a"}'])
    groups = {request.group for request in first.requests}
    assert len(groups) == 1
    assert groups.isdisjoint(request.group for request in second.requests)


def test_request_ids_are_never_used_twice(tmp_path: Path) -> None:
    first = _prepare(tmp_path, ['{"text": "a"}'])
    second = _prepare(tmp_path, ['{"text": "a"}'])
    assert set(first.pending).isdisjoint(second.pending)


def test_rows_of_an_earlier_commit_are_left_out(tmp_path: Path) -> None:
    batch = _prepare(tmp_path, ['{"text": "a"}', '{"text": "b"}', '{"text": "c"}'], done_rows=[0, 2])
    assert _texts(batch) == ["b"]


def test_a_bad_line_is_an_error_row_between_good_ones(tmp_path: Path) -> None:
    batch = _prepare(tmp_path, ['{"text": "a"}', '{"custom_id":', '{"text": "b"}'])
    assert _texts(batch) == ["a", "b"]
    (result,) = batch.results
    assert (result.row_index, result.error_code, result.finish_reason) == (1, "invalid_json", "error")
    assert "line 2" in (result.error_message or "")


def test_the_fault_of_a_row_keeps_its_custom_id_and_kept_columns(tmp_path: Path) -> None:
    batch = _prepare(tmp_path, ['{"text": null, "custom_id": "x", "lang": "vi"}'], keep=["lang"])
    (result,) = batch.results
    assert (result.error_code, result.custom_id, result.kept) == ("null_value", "x", ("vi",))


def test_a_null_can_skip_the_row(tmp_path: Path) -> None:
    batch = _prepare(tmp_path, ['{"text": null}', '{"text": "a"}'], on_null="skip")
    (result,) = batch.results
    assert (result.row_index, result.finish_reason, result.error_code) == (0, "skipped", None)
    assert _texts(batch) == ["a"]


def test_a_prompt_beyond_the_context_is_an_error_row_with_both_numbers(tmp_path: Path) -> None:
    lines = [f'{{"text": "{"x" * size}"}}' for size in (10, 500, 10)]
    batch = _prepare(tmp_path, lines, _info(context_size=128))
    assert [len(text) for text in _texts(batch)] == [10, 10]
    (result,) = batch.results
    assert (result.row_index, result.error_code, result.prompt_tokens) == (1, "prompt_too_long", 500)
    assert "500" in (result.error_message or "") and "127" in (result.error_message or "")


def test_a_prompt_that_never_fits_the_cache_is_an_error_row(tmp_path: Path) -> None:
    batch = _prepare(
        tmp_path, [f'{{"text": "{"x" * 200}"}}'], _info(context_size=512, max_request_tokens=128)
    )
    (result,) = batch.results
    assert result.error_code == "request_too_large"
    assert "200" in (result.error_message or "") and "128" in (result.error_message or "")


@pytest.mark.parametrize(("policy", "expected"), [("truncate-left", "fghij"), ("truncate-right", "abcde")])
def test_a_long_prompt_can_be_cut_on_either_side_leaving_room_for_the_output(
    tmp_path: Path, policy: str, expected: str
) -> None:
    batch = _prepare(
        tmp_path, ['{"text": "abcdefghij"}'], _info(context_size=8), on_too_long=policy, max_tokens=3
    )
    assert _texts(batch) == [expected]


def test_a_cut_never_splits_a_character(tmp_path: Path) -> None:
    batch = _prepare(
        tmp_path, ['{"text": "ằằằằ"}'], _info(context_size=9), on_too_long="truncate-right", max_tokens=2
    )
    assert _texts(batch) == ["ằằ"]


def test_a_prompt_whose_fixed_part_does_not_fit_is_an_error_row_also_when_cutting(tmp_path: Path) -> None:
    batch = _prepare(
        tmp_path,
        ['{"text": "abc"}'],
        _info(context_size=16),
        system="x" * 40,
        on_too_long="truncate-left",
        max_tokens=4,
    )
    (result,) = batch.results
    assert result.error_code == "prompt_too_long"
