"""What a --model path is found to be, and each reason to refuse it in one line."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gristmill.engine.checkpoint.gguf_config import llama3_divisors
from gristmill.engine.checkpoint.opening import check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.config import RopeScaling
from gristmill.engine.errors import ModelRefused
from tests.engine.tiny_models import CONFIG_CLASSES, build_tiny_gguf, build_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(base / name, name) for name in CONFIG_CLASSES}


@pytest.fixture
def llama(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A llama folder that the test may change."""
    return Path(shutil.copytree(folders["llama"], tmp_path / "llama"))


def _edit(folder: Path, name: str = "config.json", drop: tuple[str, ...] = (), **values: Any) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (old | values).items() if k not in drop}))


def _refusal(path: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_checkpoint(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_a_folder_and_its_gguf_file_have_the_same_configuration(
    folders: dict[str, Path], tmp_path: Path, architecture: str
) -> None:
    found = load_checkpoint(str(folders[architecture]))
    assert (found.format, found.quantization) == ("safetensors", "float32")
    config = found.config
    assert config.architecture == architecture
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (64, 2, 4, 2)
    assert (config.head_dim, config.context_size, config.vocab_size) == (16, 256, 400)
    assert (config.qkv_bias, config.qk_norm) == (architecture == "qwen2", architecture == "qwen3")
    assert config.sliding_window is None
    assert config.eos_token_ids == (2,)

    file = load_checkpoint(str(build_tiny_gguf(folders[architecture], tmp_path / "a.gguf", "Q4_1")))
    assert (file.format, file.quantization) == ("gguf", "q4_1")
    assert sorted(file.tensor_names) == sorted(found.tensor_names)
    for name in (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "context_size",
        "qkv_bias",
        "qk_norm",
        "tie_embeddings",
    ):
        assert getattr(file.config, name) == getattr(config, name)
    assert math.isclose(file.config.rms_norm_eps, config.rms_norm_eps, rel_tol=1e-6)


def test_tied_embeddings_and_biases_are_read(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    folder = build_tiny_model(tmp_path / "m", "llama", **settings)
    for path in (folder, build_tiny_gguf(folder, tmp_path / "m.gguf")):
        config = load_checkpoint(str(path)).config
        assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.tie_embeddings) == (True,) * 4


def test_a_head_size_of_its_own_is_read(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "qwen3", head_dim=32)
    assert load_checkpoint(str(folder)).config.head_dim == 32
    assert load_checkpoint(str(build_tiny_gguf(folder, tmp_path / "m.gguf"))).config.head_dim == 32


def test_the_old_and_the_new_way_to_write_rope_settings_are_read(llama: Path) -> None:
    assert load_checkpoint(str(llama)).config.rope_theta == 10000.0
    _edit(llama, drop=("rope_parameters",), rope_theta=5e5, rope_scaling=LLAMA3)
    old = load_checkpoint(str(llama)).config
    _edit(llama, drop=("rope_theta", "rope_scaling"), rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    new = load_checkpoint(str(llama)).config
    assert old == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    _edit(llama, drop=("rope_parameters",), rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert load_checkpoint(str(llama)).config.rope_scaling == RopeScaling("linear", 2.0)
    _edit(llama, rope_scaling=None)
    assert load_checkpoint(str(llama)).config.rope_scaling is None


@pytest.mark.parametrize("extra", [{}, {"attention_factor": 1.5}, {"mscale": 0.7, "mscale_all_dim": 1.0}])
def test_yarn_has_the_attention_factor_of_transformers_and_lengthens_the_context(
    llama: Path, extra: dict[str, float]
) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}
    _edit(llama, rope_parameters=rope | extra)
    config = load_checkpoint(str(llama)).config
    reference = transformers.AutoConfig.from_pretrained(llama)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    assert config.rope_scaling is not None
    assert math.isclose(config.rope_scaling.attention_factor or 0.0, factor)
    assert config.context_size == 1024


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_a_rope_scaling_that_is_not_supported_is_named(llama: Path, kind: str) -> None:
    _edit(llama, rope_parameters={"rope_type": kind, "factor": 2.0})
    assert f"rope scaling '{kind}'" in _refusal(llama)


def test_llama3_scaling_is_recovered_from_the_frequencies_of_a_gguf_file(tmp_path: Path) -> None:
    folder = build_tiny_model(
        tmp_path / "m", "llama", head_dim=64, rope_parameters=LLAMA3 | {"rope_theta": 5e5}
    )
    reference = transformers.AutoConfig.from_pretrained(folder)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, torch.device("cpu"))
    plain = 1.0 / 5e5 ** (np.arange(0, 64, 2) / 64)
    divisors = (plain / scaled.numpy()).astype(np.float32)
    np.testing.assert_allclose(
        llama3_divisors(RopeScaling("llama3", 8.0, 8192), 64, 5e5), divisors, rtol=1e-5
    )

    tensors = {"rope_freqs.weight": divisors}
    checkpoint = load_checkpoint(str(build_tiny_gguf(folder, tmp_path / "m.gguf", extra_tensors=tensors)))
    assert checkpoint.config.rope_scaling == RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)
    assert "rope_freqs.weight" not in checkpoint.tensor_names
    tensors = {"rope_freqs.weight": np.sqrt(divisors)}
    assert "rope_freqs" in _refusal(build_tiny_gguf(folder, tmp_path / "n.gguf", extra_tensors=tensors))


def test_rope_scaling_in_gguf_metadata_is_read_or_named(folders: dict[str, Path], tmp_path: Path) -> None:
    def scaling(kind: str) -> dict[str, Any]:
        return {"qwen2.rope.scaling.type": kind, "qwen2.rope.scaling.factor": 4.0}

    path = tmp_path / "a.gguf"
    linear = load_checkpoint(str(build_tiny_gguf(folders["qwen2"], path, **scaling("linear"))))
    assert linear.config.rope_scaling == RopeScaling("linear", 4.0)
    values = scaling("yarn") | {"qwen2.rope.scaling.original_context_length": 256}
    yarn = load_checkpoint(str(build_tiny_gguf(folders["qwen2"], path, **values))).config
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 256, attention_factor=0.1 * math.log(4.0) + 1.0)
    assert yarn.context_size == 1024
    assert "'longrope'" in _refusal(build_tiny_gguf(folders["qwen2"], path, **scaling("longrope")))


def test_a_sliding_window_counts_only_where_the_architecture_uses_it(tmp_path: Path) -> None:
    def window(architecture: str, **settings: Any) -> int | None:
        folder = build_tiny_model(
            tmp_path / f"{architecture}{len(list(tmp_path.iterdir()))}", architecture, **settings
        )
        return load_checkpoint(str(folder)).config.sliding_window

    assert window("mistral", sliding_window=32) == 32
    assert window("mistral", sliding_window=4096) is None  # as long as the context: no window
    assert window("qwen2", sliding_window=32, use_sliding_window=False) is None
    assert window("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=0) == 32
    assert window("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=2) is None
    with pytest.raises(ModelRefused, match="with and without a sliding window"):
        window("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1)


def test_ends_of_text_are_gathered_from_every_file(llama: Path) -> None:
    _edit(llama, eos_token_id=[7, 8])
    _edit(llama, "generation_config.json", eos_token_id=[9, 7])
    _edit(llama, "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert load_checkpoint(str(llama)).config.eos_token_ids == (9, 7, 8, 0, 2)
    _edit(llama, eos_token_id=None)
    (llama / "generation_config.json").unlink()
    assert load_checkpoint(str(llama)).config.eos_token_ids == (0, 2)


def test_the_ends_of_turns_of_a_gguf_file_are_ends_of_text(folders: dict[str, Path], tmp_path: Path) -> None:
    values = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 5}
    path = build_tiny_gguf(folders["llama"], tmp_path / "a.gguf", **values)
    assert load_checkpoint(str(path)).config.eos_token_ids == (0, 5, 2)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    assert "no such model" in _refusal(tmp_path / "missing")
    (tmp_path / "notes.txt").write_text("hello")
    assert "not a GGUF file" in _refusal(tmp_path / "notes.txt")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in _refusal(tmp_path / "empty")


def test_a_folder_without_weights_or_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").rename(llama / "elsewhere")
    assert "no tokenizer.json" in _refusal(llama)
    (llama / "elsewhere").rename(llama / "tokenizer.json")
    (llama / "model.safetensors").unlink()
    assert "no weights" in _refusal(llama)
    (llama / "pytorch_model.bin").write_bytes(b"")
    assert "pickle (pytorch_model.bin)" in _refusal(llama)


def test_a_sharded_folder_reads_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", "llama", max_shard_size="100KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    names = load_checkpoint(str(folder)).tensor_names
    assert len(names) == 21
    shards[-1].unlink()
    assert shards[-1].name in _refusal(folder)


@pytest.mark.parametrize("method", ["hqq", "bitsandbytes"])
def test_a_quantization_that_is_not_supported_is_named(llama: Path, method: str) -> None:
    _edit(llama, quantization_config={"quant_method": method})
    assert method in _refusal(llama)


def test_a_second_quantization_is_refused_and_none_is_not(smollm2_path: str) -> None:
    checkpoint = load_checkpoint(smollm2_path)
    assert checkpoint.is_quantized
    for choice in ("auto", "none"):
        check_quantization(checkpoint, choice)
    with pytest.raises(ModelRefused, match=r"quantized already \(q4_1\): leave --quantization int4 away"):
        check_quantization(checkpoint, "int4")


def test_an_architecture_that_is_not_supported_is_named(
    llama: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    _edit(llama, architectures=["FalconForCausalLM"])
    assert "FalconForCausalLM" in _refusal(llama)
    path = build_tiny_gguf(folders["llama"], tmp_path / "a.gguf", **{"general.architecture": "falcon"})
    assert "'falcon'" in _refusal(path)


def test_a_configuration_that_does_not_fit_the_tensors_is_refused(llama: Path) -> None:
    _edit(llama, hidden_size=128)
    assert "[400, 64]" in _refusal(llama)
    _edit(llama, hidden_size=64, num_hidden_layers=3)
    assert "model.layers.2.input_layernorm.weight is missing" in _refusal(llama)
    _edit(llama, num_hidden_layers=1)
    assert "model.layers.1" in _refusal(llama)
    _edit(llama, num_hidden_layers=0)
    assert "num_hidden_layers is 0" in _refusal(llama)
    _edit(llama, num_hidden_layers=2, num_key_value_heads=3)
    assert "multiple" in _refusal(llama)


def test_damaged_files_are_refused(llama: Path) -> None:
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    for size in (0, 5, 8, 100, 8 + length, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert "truncated" in _refusal(llama)
    weights.write_bytes(whole[:8] + b"x" * (len(whole) - 8))
    assert "not JSON" in _refusal(llama)
    weights.write_bytes(whole.replace(b'"F32"', b'"U32"', 1))
    assert "is U32" in _refusal(llama)
    weights.write_bytes(struct.pack("<Q", len(whole)) + whole[8:])  # a header longer than the file
    assert "truncated" in _refusal(llama)
    offsets = json.loads(whole[8 : 8 + length])["model.norm.weight"]["data_offsets"]
    overlap = str([offset - 4 for offset in offsets]).replace(" ", "").encode()
    weights.write_bytes(whole.replace(str(offsets).replace(" ", "").encode(), overlap, 1))
    assert "model.norm.weight" in _refusal(llama)
    weights.write_bytes(whole + b"more")
    assert "does not fit the file" in _refusal(llama)
    weights.write_bytes(whole)
    (llama / "config.json").write_text("{")
    assert "not valid JSON" in _refusal(llama)
    (llama / "config.json").write_text("[]")
    assert "JSON object" in _refusal(llama)


def test_a_part_of_a_split_gguf_file_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "split" in _refusal(build_tiny_gguf(folders["llama"], tmp_path / "a.gguf", **{"split.count": 2}))


def test_dtypes_resolve_to_one_that_can_be_computed() -> None:
    assert resolve_dtype("float32") == "float32"
    assert resolve_dtype("bfloat16") == "bfloat16"
    assert resolve_dtype("auto") in ("bfloat16", "float32")
    with pytest.raises(ModelRefused, match="'int4'"):
        resolve_dtype("int4")
