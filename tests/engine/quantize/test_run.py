"""The run as a whole: going on after a stop, and every order and output folder that is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gristmill.engine.errors import EngineError, ModelRefused
from gristmill.engine.quantize import run
from gristmill.engine.quantize.run import QuantizeOrder, plan_quantize, run_quantize
from gristmill.engine.quantize.writer import open_output, read_tensors, write_tensors
from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model


class Stopped(BaseException):
    """As if the process had been killed."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("source") / "model", "llama", num_hidden_layers=3)


def _order(source: Path, output: Path, **changed: Any) -> QuantizeOrder:
    values: dict[str, Any] = {"kind": "int4", "method": "rtn", "group_size": None, "calibrate": None}
    return QuantizeOrder(**{"model": str(source), "output": output, "max_tokens": 512} | values | changed)


def _run(order: QuantizeOrder, stop_before: int | None = None) -> list[int]:
    seen = []

    def on_progress(done: int, total: int) -> None:
        assert total == 3
        seen.append(done)
        if done == stop_before:
            raise Stopped

    run_quantize(plan_quantize(order), on_progress)
    return seen


def _bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _refusal(order: QuantizeOrder) -> str:
    with pytest.raises(ModelRefused) as caught:
        _run(order)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_stopped_run_goes_on_and_ends_in_the_same_bytes(
    source: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (_order(source, tmp_path / name, method=method) for name in ("whole", "parts"))
    assert _run(whole) == [0, 1, 2, 3]
    with pytest.raises(Stopped):
        _run(parts, stop_before=2)
    assert not (parts.output / "config.json").exists(), "nobody can load half a model"
    (parts.output / "model-00004-of-00004.safetensors.unfinished").write_bytes(b"torn")
    first = (parts.output / "model-00002-of-00004.safetensors").stat()
    done = []
    quantize_layer = run._quantize_layer
    monkeypatch.setattr(run, "_quantize_layer", lambda *args: done.append(args[1]) or quantize_layer(*args))
    assert _run(parts) == [0, 1, 2, 3]
    assert done == [2], "finished layers are not quantized again"
    assert (parts.output / "model-00002-of-00004.safetensors").stat().st_mtime_ns == first.st_mtime_ns
    assert _bytes(whole.output) == _bytes(parts.output)
    assert _run(parts) == [3], "a finished one has nothing to do"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"method": "gptq"}, "calibrat"),
        ({"kind": "int8"}, "group_size"),
        ({"group_size": 16}, "group_size 32, not 16"),
    ],
)
def test_another_order_does_not_go_into_the_same_folder(
    source: Path, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    _run(_order(source, tmp_path / "out"))
    before = _bytes(tmp_path / "out")
    assert named in _refusal(_order(source, tmp_path / "out", **changed))
    assert _bytes(tmp_path / "out") == before


def test_another_model_does_not_go_into_the_same_folder(source: Path, tmp_path: Path) -> None:
    _run(_order(source, tmp_path / "out"))
    other = build_tiny_model(tmp_path / "other", "llama", num_hidden_layers=3, hidden_size=32)
    assert "source" in _refusal(_order(other, tmp_path / "out"))


def test_a_folder_with_other_things_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "not empty" in _refusal(_order(source, tmp_path))
    assert "not a folder" in _refusal(_order(source, tmp_path / "notes.txt"))
    assert "not empty" in _refusal(_order(source, source)), "the source itself"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_two_processes_do_not_write_into_one_folder(source: Path, tmp_path: Path) -> None:
    plan = plan_quantize(_order(source, tmp_path / "out"))
    with open_output(plan.order.output, plan.identity, 4):
        assert "another process" in _refusal(plan.order)
    assert _run(plan.order) == [0, 1, 2, 3]


def test_a_full_disk_is_one_line_and_the_run_goes_on_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = _order(source, tmp_path / "out")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(EngineError, match="No space left on device.*goes on"):
            _run(order)
    assert _run(order) == [0, 1, 2, 3]


def test_a_damaged_layer_is_named(source: Path, tmp_path: Path) -> None:
    order = _order(source, tmp_path / "out")
    with pytest.raises(Stopped):
        _run(order, stop_before=2)
    file = order.output / "model-00003-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert f"{file}: damaged" in _refusal(order)
    file.unlink()
    assert _run(order) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 128}, "group size 128 does not divide the 64 columns.*use 32"),
        ({"kind": "int8", "group_size": 32}, "--group-size 32: int8 has one scale a row"),
        ({"kind": "fp8", "method": "awq"}, "--method awq makes int4"),
        ({"method": "gptq", "max_tokens": 100}, "too few"),
        ({"method": "gptq", "calibrate": Path("/nowhere.txt")}, "nowhere.txt: can't be read"),
    ],
)
def test_an_order_that_cannot_be_is_refused_and_writes_nothing(
    source: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelRefused, match=message):
        plan_quantize(_order(source, tmp_path / "out", **changed))
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_group_size_is_refused(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", "llama", intermediate_size=100)
    assert "64 and 100 columns" in _refusal(_order(model, tmp_path / "out"))


def test_what_is_in_codes_already_is_refused(source: Path, tmp_path: Path) -> None:
    _run(_order(source, tmp_path / "int8", kind="int8"))
    assert "quantized already" in _refusal(_order(tmp_path / "int8", tmp_path / "out"))
    file = build_tiny_gguf(source, tmp_path / "a.gguf", "Q4_1")
    assert "a GGUF file" in _refusal(_order(file, tmp_path / "out"))


def test_weights_that_are_not_finite_are_named(source: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    shutil.copytree(source, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    assert "model.layers.1.mlp.up_proj.weight holds" in _refusal(_order(tmp_path / "model", tmp_path / "out"))


def test_a_tensor_file_comes_back_and_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "a": torch.arange(5, dtype=torch.int8),
        "b": torch.tensor([[1, 2]]),
        "c": torch.randn(2, 3, dtype=torch.bfloat16),
        "d": torch.randn(3, 1).to(torch.float8_e4m3fn),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    for found in (read_tensors(tmp_path / "x.safetensors"), load_file(tmp_path / "x.safetensors")):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def test_the_order_is_readable_beside_the_model(source: Path, tmp_path: Path) -> None:
    _run(_order(source, tmp_path / "out", method="awq"))
    stated = json.loads((tmp_path / "out" / "quantize.json").read_text())
    assert (stated["to"], stated["method"], stated["group_size"]) == ("int4", "awq", 32)
    assert stated["calibrate_tokens"] == 512
