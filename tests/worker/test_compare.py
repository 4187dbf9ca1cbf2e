"""`gristmill compare` on tiny random models: real runs, their files, and what is refused before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.parquet as pq
import pytest

from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model
from tests.worker.conftest import Invoke

BUILD = "gristmill.worker.tools.compare.run.build_engine"
PROMPTS = [
    ("en", "The app crashes when I open the settings page and I can't log in."),
    ("en", "My order has not arrived yet. Please tell me where it is."),
    ("vi", "Đơn hàng của tôi bị trễ ba ngày rồi."),
    ("arithmetic", "What is 12 + 30?"),
    ("vi", "Xin hãy cho tôi biết khi nào hàng đến."),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    """Three models: two with one vocabulary, and one with another."""
    folder = tmp_path_factory.mktemp("models")
    first = build_tiny_model(folder / "first", "llama")
    second = build_tiny_model(folder / "second", "llama", num_hidden_layers=1)
    third = shutil.copytree(second, folder / "third")
    config = json.loads((third / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    vocabulary |= {token: 21 - i for token, i in vocabulary.items() if i in (10, 11)}
    (third / "tokenizer.json").write_text(json.dumps(config))
    return [str(first), str(second), str(third)]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [dict(kind=kind, prompt=text, custom_id=f"r{i}") for i, (kind, text) in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_json(invoke: Invoke, *words: str) -> dict[str, Any]:
    code, out, err = invoke("compare", *words, "--json", "--max-tokens", "8")
    assert code == 0, err
    payload: dict[str, Any] = json.loads(out)
    return payload


def test_a_model_agrees_with_itself(invoke: Invoke, models: Sequence[str], rows: Path) -> None:
    payload = run_json(invoke, models[0], models[0], "--rows", str(rows))
    overall = payload["overall"]
    assert (payload["compared"], overall["same"], overall["first_divergence"]["rows"]) == (5, 1.0, 0)
    assert overall["choices"]["agree"] in (1.0, None)
    assert overall["kl"] == {"mean": 0.0, "p99": 0.0, "max": 0.0}
    found = overall["perplexity"]
    assert found["a_under_a"] == found["a_under_b"] == found["b_under_a"] == found["b_under_b"] > 1
    assert {name: group["rows"] for name, group in payload["by_language"].items()} == {
        "en": 2, "vi": 2, "arithmetic": 1
    }  # fmt: skip


def test_a_folder_and_a_gguf_file_of_one_model_have_one_vocabulary_and_agree(
    invoke: Invoke, models: Sequence[str], rows: Path, tmp_path: Path
) -> None:
    gguf = build_tiny_gguf(Path(models[0]), tmp_path / "m.gguf")
    payload = run_json(invoke, f"{models[0]},dtype=float32", f"{gguf},dtype=float32", "--rows", str(rows))
    assert payload["notes"] == []
    assert payload["overall"]["same"] == 1.0 and payload["overall"]["kl"]["max"] < 1e-5


def test_two_models_are_held_against_each_other_and_the_files_say_the_same(
    invoke: Invoke, models: Sequence[str], rows: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--rows", str(rows), "--language", "kind", "--output", str(out))
    payload = run_json(invoke, models[0], f"{models[1]},dtype=float32", *words)
    overall, found = payload["overall"], payload["overall"]["perplexity"]
    assert set(payload["by_language"]) == {"en", "vi", "arithmetic"}
    assert overall["kl"]["mean"] > 0 and overall["same"] < 1
    assert found["a_under_a"] < found["a_under_b"] and found["b_under_b"] < found["b_under_a"]
    pairs = pq.read_table(out / "pairs.parquet").to_pylist()
    assert [pair["prompt"] for pair in pairs] == [text for _, text in PROMPTS]
    assert [pair["custom_id"] for pair in pairs] == [f"r{i}" for i in range(5)]
    tokens = sum(pair["tokens_a"] for pair in pairs)
    kl = sum(pair["kl_mean"] * pair["tokens_a"] for pair in pairs) / tokens
    assert (tokens, kl) == (overall["tokens"]["a"], pytest.approx(overall["kl"]["mean"], rel=1e-5))
    assert json.loads((out / "summary.json").read_text()) == payload
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Đơn hàng" in page or "My order" in page


def test_other_vocabularies_leave_out_the_probabilities_and_say_so(
    invoke: Invoke, models: Sequence[str], rows: Path
) -> None:
    payload = run_json(invoke, models[1], models[2], "--rows", str(rows))
    assert payload["overall"]["kl"]["mean"] is None and payload["overall"]["scored_rows"] == 0
    assert payload["notes"][0].startswith("no perplexity and no KL: the vocabularies differ: ")
    assert payload["compared"] == 5


def test_rows_at_fault_are_counted_and_the_others_are_compared(
    invoke: Invoke, models: Sequence[str], rows: Path
) -> None:
    long = json.dumps({"prompt": "word " * 400})
    rows.write_text(rows.read_text() + "{broken\n" + long + "\n")
    payload = run_json(invoke, models[0], models[1], "--rows", str(rows))
    assert (payload["rows"], payload["compared"], payload["failed"]) == (7, 5, 2)
    assert "line 6: not valid JSON" in payload["first_error"]


def test_the_table_is_printed_and_the_limit_and_the_template_hold(
    invoke: Invoke, models: Sequence[str], rows: Path
) -> None:
    words = ("--rows", str(rows), "--limit", "2", "--prompt", "Say: {{ kind }}", "--max-tokens", "3")
    code, out, err = invoke("compare", models[0], models[1], *words)
    assert code == 0, err
    assert "2 of 2 rows, answers of" in out and "all rows" in out and "KL p99" in out
    assert err.count("\n") == 3  # a line of progress a side, and one of the scores


def test_an_interrupted_comparison_writes_nothing_and_says_so(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, models: Sequence[str], rows: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(BUILD, Mock(side_effect=KeyboardInterrupt))
    words = ("--rows", str(rows), "--output", str(tmp_path / "out"))
    code, _, err = invoke("compare", models[0], models[1], *words)
    assert code == 130 and "nothing was written, the same command starts again" in err
    assert err.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rows missing.jsonl", "input 'missing.jsonl': no such file"),
        ("--language tongue", "--language 'tongue': no such column; the columns are custom_id"),
        ("--prompt {{nothing}}", "uses the column 'nothing'"),
        ("--prompt {{", "--prompt, line 1"),
        ("--messages kind", "no row can become a prompt; the first: column 'kind'"),
        ("--choices yes", "--choices 'yes': give two or more"),
        ("--max-tokens 0", "max_tokens is 0"),
        ("--limit 0", "limit is 0"),
        ("--rows EMPTY", "no rows to compare"),
        ("--output ROWS", "is not a folder"),
        ("--prompt x --messages y", "exclude each other"),
        ("--to /nowhere", "/nowhere: no such model"),
        ("--to null:", "the null engine has no weights"),
        (
            "--to MODEL,quantization=int3",
            "B: quantization='int3' is not known; choose one of auto, none, int4",
        ),
        ("--to MODEL,fp8", "B: 'fp8' is not k=v"),
    ],
)
def test_what_can_not_be_compared_is_one_line_and_exit_code_2_before_any_work(
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    models: Sequence[str],
    rows: Path,
    words: str,
    message: str,
) -> None:
    empty = rows.with_name("empty.jsonl")
    empty.touch()
    for name, value in {"ROWS": str(rows), "EMPTY": str(empty), "MODEL": models[1]}.items():
        words = words.replace(name, value)
    if (second := words.removeprefix("--to ")) != words:
        sides, given = [models[0], second], [f"--output={rows.parent}/out"]
    else:  # a side is judged as its engine is built, the words before
        monkeypatch.setattr(BUILD, lambda *_: pytest.fail("an engine was built"))
        sides, given = list(models[:2]), words.split()
    given += [] if "--rows" in given else ["--rows", str(rows)]
    code, out, err = invoke("compare", *sides, *given)
    assert (code, out) == (2, ""), err
    assert message in err and err.count("\n") == 1
    assert not (rows.parent / "out").exists()
