"""The engine without weights: deterministic text, honest finish reasons, failures and delays on request."""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.null_engine import NullEngine, parse_null_url
from gristmill.engine.request import Completion, Request, SamplingParams


def _engine(
    model: str = "null:", max_num_seqs: int | None = None, max_model_tokens: int | None = None
) -> NullEngine:
    return NullEngine(model, EngineOptions(max_num_seqs=max_num_seqs, max_model_tokens=max_model_tokens))


def _request(
    request_id: int,
    text: str = "hello",
    max_tokens: int | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(request_id, array("I", list(text.encode())), sampling, seed)


def _run(engine: NullEngine, requests: list[Request]) -> list[Completion]:
    engine.add(requests)
    completions: list[Completion] = []
    while engine.has_work():
        completions += engine.step()
    return completions


def test_the_text_depends_on_prompt_and_seed_only() -> None:
    first = _run(_engine(), [_request(1), _request(2, "other"), _request(3, seed=5)])
    second = _run(_engine(max_num_seqs=1), [_request(7, seed=5), _request(8, "other"), _request(9)])
    assert [c.text for c in first] == [c.text for c in reversed(second)]
    assert len({c.text for c in first}) == 3


def test_the_tokens_are_the_bytes_of_a_printable_text() -> None:
    for completion in _run(_engine(), [_request(i, f"prompt {i}") for i in range(300)]):
        assert bytes(completion.token_ids.tolist()) == completion.text.encode("ascii")
        assert completion.text.isprintable()
        assert completion.num_output_tokens == len(completion.token_ids)


def test_finish_reason_says_whether_max_tokens_cut_the_text() -> None:
    full = _run(_engine(), [_request(i, f"prompt {i}") for i in range(100)])
    cut = _run(_engine(), [_request(i, f"prompt {i}", max_tokens=12) for i in range(100)])
    assert {c.finish_reason for c in full} == {"stop"}
    assert {c.finish_reason for c in cut} == {"stop", "length"}
    for whole, part in zip(full, cut, strict=True):
        assert len(whole.text) <= 32
        assert part.text == whole.text[:12]
        assert part.finish_reason == ("stop" if len(whole.text) <= 12 else "length")


def test_ignore_eos_gives_exactly_max_tokens() -> None:
    (completion,) = _run(_engine(), [_request(1, max_tokens=1000, ignore_eos=True)])
    assert (completion.num_output_tokens, completion.finish_reason) == (1000, "length")


def test_a_step_completes_up_to_max_num_seqs_rows_in_order() -> None:
    engine = _engine(max_num_seqs=2)
    engine.add([_request(i) for i in range(3)])
    assert [c.request_id for c in engine.step()] == [0, 1]
    assert [c.request_id for c in engine.step()] == [2]
    assert not engine.has_work()


def test_a_cancelled_row_never_completes() -> None:
    engine = _engine()
    engine.add([_request(i) for i in range(4)])
    engine.cancel([1, 3, 99])
    assert [c.request_id for c in engine.step()] == [0, 2]


def test_failure_rate_fails_that_share_by_the_seed() -> None:
    requests = [_request(i, seed=i) for i in range(2000)]
    completions = _run(_engine("null:?failure_rate=0.1"), requests)
    failed = {c.request_id for c in completions if c.error_code == "null_failure"}
    again = _run(_engine("null:?failure_rate=0.1"), requests[::-1])
    assert 120 < len(failed) < 280
    assert failed == {c.request_id for c in again if c.finish_reason == "error"}


def test_a_prompt_that_fills_the_context_is_an_error_row() -> None:
    long, short = _run(_engine(max_model_tokens=8), [_request(1, "12345678"), _request(2, "1234567")])
    assert (long.error_code, long.finish_reason) == ("request_too_large", "error")
    assert (short.num_output_tokens, short.finish_reason) == (1, "length")


def test_each_row_takes_its_delay() -> None:
    start = time.monotonic()
    completions = _run(_engine("null:?delay_ms=5"), [_request(i) for i in range(10)])
    assert time.monotonic() - start >= 0.05
    assert completions[-1].time_to_first_token_s >= 0.005


def test_counters_add_up() -> None:
    engine = _engine(max_num_seqs=2)
    engine.add([_request(i, "four") for i in range(3)])
    (first, second) = engine.step()
    counters = engine.counters()
    assert (counters.num_steps, counters.num_prompt_tokens, counters.num_waiting) == (1, 8, 1)
    assert counters.num_output_tokens == first.num_output_tokens + second.num_output_tokens


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("null:?speed=2", "unknown key 'speed'"),
        ("null:fast", "'fast'"),
        ("null:?delay_ms", "delay_ms"),
        ("null:?delay_ms=soon", "'soon' is not a number"),
        ("null:?delay_ms=nan", "delay_ms=nan"),
        ("null:?delay_ms=-1", "delay_ms=-1"),
        ("null:?failure_rate=5", "failure_rate=5 is not within 0 and 1"),
        ("null:?crash_on=", "crash_on needs a text"),
    ],
)
def test_a_malformed_url_is_refused_with_the_keys_that_exist(model: str, reason: str) -> None:
    with pytest.raises(ModelRefused) as refusal:
        parse_null_url(model)
    assert reason in str(refusal.value)
    assert "delay_ms, failure_rate, crash_on, hang_on, load_ms" in str(refusal.value)


def test_neither_torch_nor_numpy_is_imported(repo_root: Path) -> None:
    code = (
        "import gristmill.engine.process.serve, gristmill.worker.engine.client, sys;"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
