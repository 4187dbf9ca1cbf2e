"""`gristmill bench` on tiny random models: its figures, its checks, its plot, and what it refuses before any work."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.engine import Engine
from gristmill.engine.request import Completion, EngineCounters, EngineInfo
from gristmill.engine.step_trace import StepRecord
from gristmill.worker.tools.bench.plot import draw_trace
from gristmill.worker.tools.bench.run import BenchRun, find_miscount, pick_median
from gristmill.worker.tools.bench.workload import BenchRow
from tests.engine.tiny_models import build_tiny_model
from tests.worker.conftest import Invoke

SHAPE = "hidden=64,layers=2,heads=4,kv_heads=2,intermediate=96,vocab=300,context=256"
BENCH = ("bench", "--threads", "1", "--max-batched-tokens", "64")
SMALL = (*BENCH, "--shape", SHAPE, "--rows", "8", "--shared-prefix", "40", "--prompt-tokens", "4-9")
SMALL_JSON = (*SMALL, "--output-tokens", "3-12", "--kv-blocks", "64", "--json")
PARTS = ("schedule", "build", "forward", "sample", "finish")
PNG_HEAD = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rates measured in milliseconds, and torch's threads put back."""
    monkeypatch.setattr("gristmill.engine.measure.roofline.STREAM_BYTES", 1 << 20)
    monkeypatch.setattr("gristmill.engine.measure.roofline.GEMM_SHAPE", (64, 64, 64))
    monkeypatch.setattr("gristmill.engine.measure.roofline.PROBE_S", 0.01)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run_json(invoke: Invoke, *words: str) -> dict[str, Any]:
    code, out, err = invoke(*words)
    assert code == 0, err
    payload: dict[str, Any] = json.loads(out)
    return payload


def build_step(start_s: float, **fields: int) -> StepRecord:
    names = (
        *("num_decode_tokens", "num_prefill_tokens", "num_sampled", "num_finished", "num_preempted"),
        *("num_running", "num_waiting", "num_blocks_used", "context_tokens", "unique_context_tokens"),
        "num_query_keys",
    )
    return StepRecord(start_s, 0.001, 0.002, 0.05, 0.01, 0.001, **(dict.fromkeys(names, 1) | fields))


def test_the_figures_of_a_run_agree_with_each_other(invoke: Invoke) -> None:
    payload = run_json(invoke, *SMALL_JSON, "--repeat", "3")
    assert (payload["rows"], payload["dtype"], payload["counts_exact"]) == (8, resolve_dtype("auto"), True)
    rates = sorted(payload["runs_output_tokens_per_s"])
    assert payload["output_tokens_per_s"] == rates[1] and len(rates) == 3
    assert payload["output_tokens_per_s"] == pytest.approx(payload["output_tokens"] / payload["seconds"])
    steps, total_s = payload["steps"], payload["steps"]["total"]["total_s"]
    assert total_s == pytest.approx(sum(steps[name]["total_s"] for name in PARTS))
    assert total_s + steps["outside_s"] == pytest.approx(payload["seconds"])
    shares = [steps[name]["share"] for name in ("schedule", "build", "finish")]
    assert steps["bookkeeping"]["share"] == pytest.approx(sum(shares))
    occupancy, roofline = payload["occupancy"], payload["roofline"]
    assert 0 < occupancy["kv_mean"] <= occupancy["kv_peak"] <= 1 and 0 < occupancy["budget_mean"] <= 1
    floors = [roofline[f"{name}_s"] for name in ("linear", "attention", "head")]
    assert roofline["floor_s"] == pytest.approx(sum(floors))
    assert roofline["fraction"] == pytest.approx(roofline["floor_s"] / payload["seconds"])


def test_the_table_names_every_figure_and_the_kernels_in_use_which_can_be_capped(invoke: Invoke) -> None:
    code, out, err = invoke(*SMALL, "--output-tokens", "3", "--cpu-kernels", "none", "--dtype", "float32")
    assert code == 0, err
    assert SHAPE in out and out.splitlines()[0].endswith("float32 on cpu, torch kernels")
    labels = ("rows", "speed", "tokens", "saved", "preemptions", "budget", "KV cache", "running", "roofline")
    for label in (*labels, *PARTS, "bookkeeping", "outside"):
        assert f"\n  {label} " in out


def test_sharing_saves_what_can_be_saved_the_same_in_each_pass_and_can_be_turned_off(invoke: Invoke) -> None:
    first, third = (run_json(invoke, *SMALL_JSON, "--repeat", repeat) for repeat in ("1", "3"))
    shared = first["prefix"]
    assert shared["max_saved_tokens"] >= 7 * 40 and 0.7 < shared["share_of_max"] <= 1.0
    assert third["prefix"] == shared and first["steps"]["count"] == third["steps"]["count"]
    alone = run_json(invoke, *SMALL_JSON, "--no-sharing")["prefix"]
    assert alone["saved_tokens"] == 0 and alone["max_saved_tokens"] == shared["max_saved_tokens"]


def test_a_cache_too_small_for_all_rows_and_static_batches_keep_the_counts_exact(invoke: Invoke) -> None:
    crowded = run_json(invoke, *SMALL_JSON, "--kv-blocks", "9", "--no-sharing")
    assert crowded["engine"]["num_kv_blocks"] == 9 and crowded["occupancy"]["kv_peak"] > 0.5
    static = run_json(invoke, *SMALL_JSON, "--static", "--max-num-seqs", "3")
    assert static["occupancy"]["running_peak"] <= 3
    assert static["output_tokens"] == crowded["output_tokens"]


def test_a_file_of_ids_runs_in_its_order_or_shuffled(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    rows = [{"wl": "AB"[i % 2], "i": i, "ids": [5, 6, i], "max_tokens": i + 1} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (*BENCH, str(path), "--shape", SHAPE, "--json")
    payload = run_json(invoke, *words, "--workload", "B", "--rows", "2")
    assert (payload["rows"], payload["prompt_tokens"], payload["output_tokens"]) == (2, 6, 6)
    assert run_json(invoke, *words, "--shuffle")["output_tokens"] == 21


def test_a_model_and_texts_run_too(invoke: Invoke, tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", "llama")
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "My order", "max_tokens": 3}\n{"prompt": "The app", "max_tokens": 2}\n')
    payload = run_json(invoke, *BENCH, str(path), "--model", str(model), "--dtype", "float32", "--json")
    assert (payload["rows"], payload["output_tokens"], payload["model"]) == (2, 5, str(model))
    assert payload["prompt_tokens"] > 2


def test_a_wrong_token_count_is_one_line_and_exit_code_1(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def cut(engine: Engine) -> list[Completion]:
        return [replace(each, num_output_tokens=each.num_output_tokens - 1) for each in step(engine)]

    monkeypatch.setattr(Engine, "step", cut)
    code, out, err = invoke(*SMALL, "--output-tokens", "3")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("gristmill: wrong token counts: row 1 has ")


def test_a_trace_is_a_png_also_with_preemptions_and_of_a_single_step(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    code, _, err = invoke(*SMALL, "--output-tokens", "3", "--trace", str(path))
    assert code == 0 and path.read_bytes().startswith(PNG_HEAD), err
    info = EngineInfo("m", "float32", 256, 256, 10, 16, 8, 64, 0.1, "cpu")
    many = [build_step(i * 0.07, num_preempted=i % 3 == 2, num_waiting=9_000 - i) for i in range(40)]
    for steps in (many, many[:1]):
        draw_trace(path, steps, info, "title")
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert path.read_bytes().startswith(PNG_HEAD) and width > 1000 and height > 700


def test_without_matplotlib_a_trace_is_refused_before_any_work(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gristmill.worker.tools.bench.plot.find_spec", lambda name: None)
    expected = "gristmill: --trace needs matplotlib: pip install matplotlib\n"
    assert invoke(*SMALL, "--trace", str(tmp_path / "t.png")) == (2, "", expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give either --model PATH, or --shape"),
        ("--model m --shape smollm2-135m", "give either --model PATH, or --shape"),
        ("--model /nowhere", "/nowhere: no such model"),
        ("--model null:", "the null engine has no weights"),
        ("--shape gpt-9", "--shape 'gpt-9' is not known"),
        *((f"--shape {SHAPE} {words}", message) for words, message in (
            ("--dtype int3", "'int3' is not one of"),
            ("--kv-blocks 9 --kv-cache-mib 9", "exclude each other"),
            ("--rows 0", "Invalid value for '--rows'"),
            ("--levels 300", "the longest row has"),
            ("--levels 20:x", "'20:x' is not TOKENS:FAN-OUT"),
            ("--prompt-tokens 9-4", "--prompt-tokens '9-4'"),
            ("--output-tokens 1-9:40", "the mean lies between 1 and 9"),
            ("--output-tokens 250", "tokens with its output, the model's context holds 256"),
            ("--prompt-tokens 9 --shared-prefix 9 --kv-blocks 4", "the KV cache holds 64"),
            ("--workload A", "--workload chooses rows of a file"),
            ("missing.jsonl", "missing.jsonl: No such file"),
            ("some.jsonl --levels 9:1", "--levels describes made-up rows"),
            ("--trace plot.svg", "ends in .png"),
            ("--trace /nowhere/plot.png", "/nowhere is not a folder"),
        )),
    ],
)  # fmt: skip
def test_what_can_not_run_is_one_line_and_exit_code_2_before_any_work(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.setattr(
        "gristmill.worker.cli.bench.load_engine", lambda *_: pytest.fail("the engine was loaded")
    )
    code, out, err = invoke("bench", *words.split())
    assert (code, out) == (2, ""), err
    assert message in err and err.count("\n") == 1


def test_a_token_id_beyond_the_vocabulary_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"ids": [1, 300], "max_tokens": 1}\n')
    code, _, err = invoke("bench", str(path), "--shape", SHAPE)
    assert code == 2 and "token id 300 is beyond the model's vocabulary of 300" in err


def build_run(seconds: float = 1.0, num_sampled: int = 2, **fields: Any) -> BenchRun:
    values: dict[str, Any] = {
        "request_id": 0, "token_ids": array("I", [1, 2]), "text": "", "finish_reason": "length",
        "num_prompt_tokens": 3, "num_cached_tokens": 0, "num_output_tokens": 2, "queue_wait_s": 0.0,
        "time_to_first_token_s": 0.0, "time_per_token_s": 0.0,
    }  # fmt: skip
    steps = (build_step(0.0, num_sampled=num_sampled),)
    return BenchRun(seconds, {0: Completion(**(values | fields))}, steps, EngineCounters())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"num_output_tokens": 1}, "1 output tokens"),
        ({"token_ids": array("I", [1])}, "(1 ids)"),
        ({"num_prompt_tokens": 4}, "4 prompt tokens"),
        ({"error_code": "x", "error_message": "too large"}, "row 1 failed: too large"),
        ({"num_sampled": 3}, "the steps sampled 3 tokens, the rows have 2"),
        (None, "row 1 has no completion"),
    ],
)
def test_every_way_to_miscount_is_found(fields: dict[str, Any] | None, problem: str | None) -> None:
    run = replace(build_run(), completions={}) if fields is None else build_run(**fields)
    found = find_miscount([BenchRow(array("I", [1, 2, 3]), 2)], run)
    assert found is None if problem is None else found is not None and problem in found


def test_the_median_run_is_the_middle_one_or_the_slower_of_two() -> None:
    runs = [build_run(seconds) for seconds in (5.0, 1.0, 3.0, 2.0)]
    assert [pick_median(some).seconds for some in (runs, runs[:3], runs[1:2])] == [3.0, 3.0, 1.0]
