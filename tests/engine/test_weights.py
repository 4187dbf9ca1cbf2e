"""Weights of both formats against transformers and the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import transformers

from gristmill.engine.checkpoint import gguf_codes
from gristmill.engine.checkpoint.gguf import load_gguf, tensor_bytes
from gristmill.engine.checkpoint.gguf_quants import BLOCK_SHAPES
from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import dequantized, iterate_weights, load_tensor
from tests.engine.tiny_models import CONFIG_CLASSES, build_tiny_gguf, build_tiny_model


def _load(path: str | Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(dequantized(iterate_weights(load_checkpoint(str(path)), dtype), dtype))


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_a_folder_and_its_gguf_file_give_the_weights_of_transformers(
    tmp_path: Path, architecture: str
) -> None:
    folder = build_tiny_model(tmp_path / "m", architecture)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    _assert_equal(_load(folder), expected)
    _assert_equal(_load(build_tiny_gguf(folder, tmp_path / "m.gguf")), expected)


def test_biases_of_interleaved_projections_are_put_in_order_too(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama", attention_bias=True, mlp_bias=True)
    _assert_equal(_load(build_tiny_gguf(folder, tmp_path / "m.gguf")), _load(folder))


@pytest.mark.parametrize("weight_type", [name for name, (size, _) in BLOCK_SHAPES.items() if size <= 32])
def test_each_tensor_type_of_gguf_reads_as_the_gguf_package_reads_it(
    tmp_path: Path, weight_type: str
) -> None:
    folder = build_tiny_model(tmp_path / "m", "qwen3")  # its rows are not reordered
    path = build_tiny_gguf(folder, tmp_path / "m.gguf", weight_type)
    found = _load(path)
    for tensor in gguf.GGUFReader(path).tensors:
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        name = {"token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight"}.get(
            tensor.name
        )
        if tensor.name == "blk.1.ffn_down.weight":
            name = "model.layers.1.mlp.down_proj.weight"
        if name is not None:
            assert torch.equal(found[name], expected), name
    _assert_equal(_load(path, torch.bfloat16), {name: tensor.bfloat16() for name, tensor in found.items()})


@pytest.mark.parametrize("weight_type", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantized_rows_are_put_in_order(tmp_path: Path, weight_type: str) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = build_tiny_gguf(folder, tmp_path / "m.gguf", weight_type)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    _assert_equal(_load(path), loaded.state_dict())


def test_a_folder_of_half_precision_weights_is_cast(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype).save_pretrained(folder)
        checkpoint = load_checkpoint(str(folder))
        assert checkpoint.quantization == str(dtype).removeprefix("torch.")
        for wanted in (torch.float32, torch.bfloat16):
            expected = {name: tensor.to(wanted) for name, tensor in model.state_dict().items()}
            _assert_equal(dict(iterate_weights(checkpoint, wanted)), expected)


def test_a_tied_copy_of_the_embeddings_is_not_read(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "qwen2", tie_word_embeddings=True)
    assert "lm_head.weight" not in _load(folder)
    assert "lm_head.weight" not in _load(build_tiny_gguf(folder, tmp_path / "m.gguf"))


def test_a_tensor_read_in_many_slices_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama")
    path = build_tiny_gguf(folder, tmp_path / "m.gguf", "Q4_1")
    whole = _load(path)
    monkeypatch.setattr(gguf_codes, "MAX_SLICE_WEIGHTS", 7 * 64)
    _assert_equal(_load(path), whole)


@pytest.mark.parametrize(
    ("name", "gguf_name", "num_heads"),
    [
        ("model.embed_tokens.weight", "token_embd.weight", 0),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight", 9),
        ("model.layers.29.self_attn.k_proj.weight", "blk.29.attn_k.weight", 3),
        ("model.layers.15.self_attn.v_proj.weight", "blk.15.attn_v.weight", 0),
        ("model.layers.15.mlp.down_proj.weight", "blk.15.ffn_down.weight", 0),
    ],
)
def test_smollm2_reads_as_the_gguf_package_reads_it(
    smollm2_path: str, name: str, gguf_name: str, num_heads: int
) -> None:
    checkpoint = load_checkpoint(smollm2_path)
    assert (checkpoint.quantization, len(checkpoint.tensors)) == ("q4_1", 272)
    file = load_gguf(smollm2_path)
    kind = gguf.GGMLQuantizationType[file.tensors[gguf_name].type]
    rows = tensor_bytes(file, gguf_name).reshape(file.tensors[gguf_name].shape[0], -1)
    expected = gguf.dequantize(rows, kind)
    if num_heads:
        expected = expected.reshape(num_heads, 32, 2, -1).swapaxes(1, 2).reshape(expected.shape)
    found = load_tensor(checkpoint.tensors[name], torch.float32)
    assert torch.equal(found, torch.from_numpy(expected.copy()))
