"""ModelConfig from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gristmill.engine.checkpoint.architectures import ARCHITECTURES
from gristmill.engine.checkpoint.eos import gguf_eos_token_ids
from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.gguf import GGUFFile, tensor_bytes
from gristmill.engine.checkpoint.gguf_quants import dequantize
from gristmill.engine.config import ModelConfig, RopeScaling, yarn_magnitude
from gristmill.engine.errors import ModelRefused

# A list, one number for each layer, is what a model has whose layers differ.
_REMEDY = "use a model whose layers are alike, or convert it again"


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Read the shape of a decoder; raises ModelRefused for what is not supported."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelRefused(
            f"{file.path}: architecture {architecture!r} is not supported;"
            f" use one of {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ModelRefused(
            f"{file.path}: one part of a split GGUF; merge the parts first (llama-gguf-split --merge)"
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): v for key, v in file.metadata.items() if key.startswith(prefix)}
    keys = ConfigSection(str(file.path), f"metadata {architecture}", values, _REMEDY)
    if values.get("expert_count"):
        raise ModelRefused(f"{file.path}: a mixture of experts is not supported; use a dense model")
    num_heads = keys.size("attention.head_count")
    hidden_size = keys.size("embedding_length")
    head_dim = keys.size("attention.key_length", hidden_size // num_heads)
    if keys.size("attention.value_length", head_dim) != head_dim:
        raise ModelRefused(f"{file.path}: keys and values of different lengths are not supported")
    if keys.size("rope.dimension_count", head_dim) != head_dim:
        raise ModelRefused(f"{file.path}: rotary embedding over part of a head is not supported")
    rope_theta = keys.number("rope.freq_base", 10000.0)
    context_size = keys.size("context_length")
    scaling = _rope_scaling(file, keys, head_dim, rope_theta, context_size)
    context_size = context_size if scaling is None else scaling.stretch(context_size)
    window = keys.number("attention.sliding_window", 0.0)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file, keys),
        hidden_size=hidden_size,
        intermediate_size=keys.size("feed_forward_length"),
        num_layers=keys.size("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_size=context_size,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in file.tensors,
        sliding_window=int(window) if window and window < context_size else None,
        eos_token_ids=gguf_eos_token_ids(file),
        **ARCHITECTURES[architecture].gguf_flags(file.metadata, file.tensors),
    )


def _vocab_size(file: GGUFFile, keys: ConfigSection) -> int:
    """The rows of the embeddings: vocab_size is optional in GGUF, and the tokenizer may be shorter."""
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelRefused(f"{file.path}: tensor token_embd.weight is missing; the checkpoint is incomplete")
    return keys.size("vocab_size", embeddings.shape[0])


def _rope_scaling(
    file: GGUFFile, keys: ConfigSection, head_dim: int, rope_theta: float, context_size: int
) -> RopeScaling | None:
    kind = keys.values.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, head_dim, rope_theta)
    if kind == "linear" or (kind == "none" and "rope.scale_linear" in keys.values and factor != 1.0):
        return RopeScaling("linear", factor)
    if kind == "none":
        return None
    if kind != "yarn":
        raise ModelRefused(
            f"{file.path}: rope scaling {kind!r} is not supported; use a model with linear, llama3 or yarn"
        )
    original = keys.size("rope.scaling.original_context_length", context_size)
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=yarn_magnitude(factor) * keys.number("rope.scaling.attn_factor", 1.0),
    )


def _llama3_scaling(file: GGUFFile, head_dim: int, rope_theta: float) -> RopeScaling:
    """GGUF keeps of llama3 scaling only the result, a divisor per frequency; recover its parameters."""
    tensor = file.tensors["rope_freqs.weight"]
    divisors = dequantize(tensor_bytes(file, tensor.name), tensor.type)
    factor = float(np.round(divisors.max(), 4))
    for original in (8192, 4096, 2048, 16384, 32768):
        scaling = RopeScaling("llama3", factor, original, low_freq_factor=1.0, high_freq_factor=4.0)
        wanted = llama3_divisors(scaling, head_dim, rope_theta)
        if wanted.shape == divisors.shape and np.allclose(wanted, divisors, rtol=1e-4):
            return scaling
    raise ModelRefused(
        f"{file.path}: rope_freqs.weight is not a llama3 rope scaling with frequency factors 1 and 4;"
        " use the Hugging Face folder of this model"
    )


def llama3_divisors(
    scaling: RopeScaling, head_dim: int, rope_theta: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By how much llama3 scaling divides each rotary frequency; float64 [head_dim / 2]."""
    wavelengths = 2 * math.pi * rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_context_size / wavelengths - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
