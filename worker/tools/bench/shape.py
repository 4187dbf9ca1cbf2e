"""The shape of a model for `gristmill bench --shape`: by name, or spelled out; the weights will be random.

The names are those of published models and say nothing about their weights.
"""

from __future__ import annotations

from typing import Any

from gristmill.engine.checkpoint.architectures import ARCHITECTURES
from gristmill.engine.config import ModelConfig
from gristmill.worker.show.console import UsageRefused

DEFAULT_CONTEXT_SIZE = 8192
NEEDED = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab")
OPTIONAL = ("head_dim", "context", "tied")
EXAMPLE = "hidden=576,layers=30,heads=9,kv_heads=3,intermediate=1536,vocab=49152"


def _shape(*needed: int, architecture: str = "llama", **optional: int) -> ModelConfig:
    """needed: in the order of NEEDED."""
    hidden, layers, heads, kv_heads, intermediate, vocab = needed
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=optional.get("head_dim", hidden // heads),
        context_size=optional.get("context", DEFAULT_CONTEXT_SIZE),
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        tie_embeddings=bool(optional.get("tied", 1)),
        **ARCHITECTURES[architecture].fixed_flags,
    )


SHAPES = {
    "smollm2-135m": _shape(576, 30, 9, 3, 1536, 49152),
    "smollm2-360m": _shape(960, 32, 15, 5, 2560, 49152),
    "smollm2-1.7b": _shape(2048, 24, 32, 32, 8192, 49152),
    "llama-3.2-1b": _shape(2048, 16, 32, 8, 8192, 128256),
    "llama-3.2-3b": _shape(3072, 28, 24, 8, 8192, 128256),
    "llama-3.1-8b": _shape(4096, 32, 32, 8, 14336, 128256, tied=0),
    "qwen2.5-0.5b": _shape(896, 24, 14, 2, 4864, 151936, architecture="qwen2"),
    "qwen3-0.6b": _shape(1024, 28, 16, 8, 3072, 151936, head_dim=128, architecture="qwen3"),
}


def parse_shape(text: str) -> ModelConfig:
    """The shape of a name in SHAPES or of `hidden=576,layers=30,...`; raises UsageRefused."""
    if text.lower() in SHAPES:
        return SHAPES[text.lower()]
    if "=" not in text:
        raise UsageRefused(f"--shape {text!r} is not known: one of {', '.join(SHAPES)}, or {EXAMPLE}")
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, _, number = item.strip().partition("=")
        if name not in NEEDED + OPTIONAL:
            raise UsageRefused(f"--shape: {name!r} is not one of {', '.join(NEEDED + OPTIONAL)}")
        if not number.isdecimal() or (int(number) < 1 and name != "tied"):
            raise UsageRefused(f"--shape: {name}={number} is not a whole number from 1")
        values[name] = int(number)
    missing = [name for name in NEEDED if name not in values]
    if missing:
        raise UsageRefused(f"--shape: {', '.join(missing)} missing, as in {EXAMPLE}")
    config = _shape(*(values.pop(name) for name in NEEDED), **values)
    if config.num_heads % config.num_kv_heads:
        raise UsageRefused(
            f"--shape: {config.num_heads} heads over {config.num_kv_heads} kv_heads: give a multiple"
        )
    if "head_dim" not in values and config.hidden_size % config.num_heads:
        raise UsageRefused(
            f"--shape: hidden={config.hidden_size} over {config.num_heads} heads does not divide: give head_dim"
        )
    if config.head_dim % 16:
        raise UsageRefused(f"--shape: a head_dim of {config.head_dim} is not a multiple of 16")
    return config
