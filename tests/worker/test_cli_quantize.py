"""`gristmill quantize` from the outside: what it prints, what it writes, and one line for each bad word."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from gristmill.worker.show.quantize_progress import LayerProgress
from tests.engine.tiny_models import build_tiny_model
from tests.worker.conftest import Invoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "model", "llama")


def test_it_says_the_group_size_and_why_and_the_bytes(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    code, out, err = invoke("quantize", str(model), "--to", "int4", "--output", str(tmp_path / "out"))
    assert code == 0, err
    assert "rtn int4, group size 32, the largest of 128, 64 and 32 that divides" in out
    assert "(64, 96)" in out and "MB of weights" in out and "2/2 layers" in err
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


def test_rows_to_calibrate_with_choose_gptq(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"order {i} is late"}) + "\n" for i in range(200)))
    words = ("--to", "int4", "--output", str(tmp_path / "out"), "--calibrate-tokens", "600")
    code, out, err = invoke("quantize", str(model), *words, "--calibrate", str(rows))
    assert code == 0, err
    assert "gptq int4" in out and f"calibrating with 512 tokens of {rows}" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--to int3", "int3"),
        ("--to int4 --method rtn --calibrate x", "--method rtn looks at no text"),
        ("--to int4 --group-size 128", "does not divide"),
        ("--to int4 --group-size 0", "--group-size"),
        ("--to fp8 --method gptq", "--method gptq makes int4"),
        ("--to int8 --group-size 32", "one scale a row"),
        ("--to int4 --calibrate /nowhere.txt", "can't be read"),
        ("--to int8", "no such model"),
    ],
)
def test_a_bad_word_is_one_line_and_exit_code_2(
    invoke: Invoke, model: Path, tmp_path: Path, words: str, message: str
) -> None:
    path = str(tmp_path / "none") if "model" in message else str(model)
    code, _, err = invoke("quantize", path, "--output", str(tmp_path / "out"), *words.split())
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_progress_is_a_line_now_and_then_with_the_time_left() -> None:
    stream, clock = io.StringIO(), iter([0.0, 3.0, 6.0, 40.0])
    with LayerProgress(stream, lambda: next(clock)) as progress:
        for done in (0, 1, 2, 4):
            progress.update(done, 4)
    assert stream.getvalue() == "2/4 layers, 0:06 left\n4/4 layers\n"
