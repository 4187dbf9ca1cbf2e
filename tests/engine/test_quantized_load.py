"""Quantization and the KV cache's type, chosen at load: what lies in memory, and the text that comes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers

from gristmill.engine.build import build_random_engine
from gristmill.engine.checkpoint.fingerprint import fingerprint
from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.quantize.rtn import default_group_size, quantize_rtn
from gristmill.kernels.cpu import backend as cpu_backend
from gristmill.kernels.quantized import QuantizedTensor
from gristmill.kernels.torch import backend as torch_backend
from tests.engine.parity import Oracle, generate, load_engine
from tests.engine.tiny_models import build_tiny_gguf, build_tiny_model
from tests.kernels.test_layers_cpu import PLAIN

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PROMPTS = [list(range(5, 28)), list(range(60, 130)), [7, 300, 12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "qwen2", **SIZES)


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4.5), ("int8", 8.5), ("fp8", 8.5)])
def test_weights_quantized_at_load_give_the_tokens_of_their_rounded_values(folder, kind, bits):
    engine = load_engine(str(folder), quantization=kind, num_kv_blocks=32)
    if engine.info.cpu_kernels != "none":
        assert engine.info.linear_bits == pytest.approx(bits, abs=0.6)  # scales of short rows weigh much
    assert engine.info.head_bits == 32.0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    group_size = default_group_size(load_checkpoint(str(folder)).config) if kind == "int4" else None
    rounded = {
        name: quantize_rtn(tensor, kind, group_size).dequantize()
        for name, tensor in model.state_dict().items()
        if name.endswith("_proj.weight")
    }
    model.load_state_dict(rounded, strict=False)
    Oracle(model).check_equal(PROMPTS, generate(engine, PROMPTS, 12))


def test_none_makes_numbers_of_codes_and_auto_keeps_them(folder, tmp_path):
    path = str(build_tiny_gguf(folder, tmp_path / "m.gguf", "Q4_1"))
    kept = [w for _, w in iterate_weights(load_checkpoint(path), torch.float32) if not torch.is_tensor(w)]
    assert kept and all(isinstance(weight, QuantizedTensor) for weight in kept)
    auto, none = load_engine(path), load_engine(path, quantization="none")
    assert none.info.linear_bits == 32.0
    if auto.info.cpu_kernels != "none":
        assert auto.info.linear_bits < 32.0
    assert generate(auto, PROMPTS, 12) == generate(none, PROMPTS, 12)


def test_codes_become_bfloat16_for_many_rows_where_the_cpu_multiplies_it_and_memory_allows(
    folder, tmp_path, monkeypatch, caplog
):
    path = str(build_tiny_gguf(folder, tmp_path / "m.gguf", "Q4_1"))

    def are_unpacked(**options):  # codes that stay have fewer bits; 32 without the C++ kernels
        return load_engine(path, **options).info.linear_bits == 16

    monkeypatch.setattr(cpu_backend, "detect_level", lambda: "avx2")
    assert not are_unpacked(dtype="bfloat16")
    monkeypatch.setattr(cpu_backend, "detect_level", lambda: "amx")
    caplog.set_level("INFO")
    assert are_unpacked(dtype="bfloat16")
    assert "held as bfloat16" in caplog.text
    assert not are_unpacked(dtype="bfloat16", max_num_seqs=torch_backend.MAX_CODES_ROWS)
    assert not are_unpacked(dtype="bfloat16", cpu_kernels="avx512")
    assert not are_unpacked(dtype="float32")
    monkeypatch.setattr(torch_backend, "available_bytes", lambda: 100_000)
    assert not are_unpacked(dtype="bfloat16")
    assert "weights stay in codes" in caplog.text


def test_codes_are_not_quantized_again_and_what_no_group_size_fits_is_refused(folder, tmp_path):
    path = str(build_tiny_gguf(folder, tmp_path / "m.gguf", "Q8_0"))
    with pytest.raises(ModelRefused, match="quantized already"):
        load_engine(path, quantization="int4")
    odd = build_tiny_model(tmp_path / "odd", "llama", hidden_size=80, intermediate_size=96, head_dim=16)
    with pytest.raises(ModelRefused, match="--quantization int4.*80"):
        load_engine(str(odd), quantization="int4")


def test_an_fp8_cache_takes_a_quarter_of_the_memory_and_its_settings_are_in_the_fingerprint(folder):
    half = load_engine(str(folder), num_kv_blocks=None, kv_cache_bytes=1 << 20)
    engine = load_engine(str(folder), kv_dtype="fp8", num_kv_blocks=None, kv_cache_bytes=1 << 20)
    assert (half.info.kv_bits, engine.info.kv_bits) == (32, 8)
    assert engine.info.num_kv_blocks == 4 * half.info.num_kv_blocks
    assert all(len(tokens) == 12 for tokens in generate(engine, PROMPTS, 12))
    marks = {
        fingerprint(str(folder), "float32", *settings)
        for settings in ((), ("int4",), ("auto", "fp8"), ("int4", "fp8"), ("none",))
    }
    assert len(marks) == 5
    assert fingerprint(str(folder), "float32", "auto", "auto") in marks


def test_a_shape_of_random_weights_can_be_quantized_too():
    options = EngineOptions(dtype="float32", quantization="int8", kv_dtype="fp8", num_kv_blocks=8)
    shape = replace(PLAIN, vocab_size=300)  # the text that an FP8 cache is scaled by is read as bytes
    engine = build_random_engine(shape, options, "random")
    assert engine.info.kv_bits == 8 and engine.info.linear_bits < 12
