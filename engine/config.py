"""Settings of the engine and the shape of a model, as values.

Derived settings come from functions that return new objects; nothing here is changed after construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

BLOCK_SIZE = 16  # tokens in a KV block


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """An engine option on the command line: a choice, a whole number of at least `minimum`, or a switch, which
    turns the default around.

    words: the flag where it is not the field's name; unit: what the number counts.
    """

    help: str
    metavar: str | None = None
    words: str | None = None
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    unit: int = 1


def _flag(default: Any, help: str, **facts: Any) -> Any:
    return field(default=default, metadata={"flag": EngineFlag(help, **facts)})


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set about the engine. None: chosen at load from the device and the model."""

    device: str = "auto"  # one of kernels.dispatch.DEVICES; auto: the CPU
    dtype: str = _flag(
        "auto",
        "Default auto: bfloat16 where the machine is fast at it.",
        choices=("auto", "bfloat16", "float32"),
    )
    quantization: str = _flag(
        "auto",
        "Of weights. Default auto: as the files have them; none: in the dtype; else made at load.",
        choices=("auto", "none", "int4", "fp8", "int8"),
    )
    kv_dtype: str = _flag("auto", "Of the KV cache; default auto: the dtype.", choices=("auto", "fp8"))
    num_kv_blocks: int | None = _flag(
        None, "Blocks of 16 tokens in the KV cache.", metavar="N", words="--kv-blocks", minimum=2
    )  # overrides kv_cache_bytes; tests use it to force preemption
    kv_cache_bytes: int | None = _flag(
        None,
        "The KV cache's size in MiB instead.",
        metavar="N",
        words="--kv-cache-mib",
        minimum=1,
        unit=1 << 20,
    )
    max_num_seqs: int | None = _flag(None, "Most rows that run at a time.", metavar="N", minimum=1)
    max_num_batched_tokens: int | None = _flag(
        None, "Token budget of a step.", metavar="N", words="--max-batched-tokens", minimum=1
    )
    enable_prefix_cache: bool = _flag(True, "Compute every prompt in full.", words="--no-sharing")
    static_batches: bool = _flag(
        False, "Static batches in file order, to compare with: one ends, one begins.", words="--static"
    )
    cpu_kernels: str = _flag(
        "auto",
        "The highest instruction set to use; default auto.",
        choices=("auto", "amx", "avx512_bf16", "avx512", "avx2", "none"),
    )
    num_threads: int | None = _flag(None, "Default: all cores.", metavar="N", words="--threads", minimum=1)
    max_model_tokens: int | None = None  # lowers the model's context
    record_steps: bool = False  # keep a StepRecord of every step


def engine_flags() -> dict[str, EngineFlag]:
    """The flags of EngineOptions by field."""
    return {each.name: each.metadata["flag"] for each in fields(EngineOptions) if "flag" in each.metadata}


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines by, unless a model says it (arXiv 2309.00071, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling as config.json states it. kind: linear, llama3 or yarn."""

    kind: str
    factor: float = 1.0
    original_context_size: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def stretch(self, context_size: int) -> int:
        """The tokens of context that a model has with it, which states `context_size`; only yarn adds to them."""
        return max(context_size, int(self.factor * self.original_context_size) if self.kind == "yarn" else 0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder described by flags; a new architecture is a new set of flags, not a new model file."""

    architecture: str  # a name of checkpoint.architectures
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None  # tokens, on every layer
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_bytes_per_token_f32(self) -> int:
        """Bytes of keys and values that one token takes over all layers, in float32."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4
