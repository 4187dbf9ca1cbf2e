"""Settings of the engine and the shape of a model, as values.

Derived settings come from functions that return new objects; nothing here is changed after construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BLOCK_SIZE = 16  # tokens in a KV block
# auto: weights as the checkpoint has them; none: in the model's dtype; the others: quantized when they are loaded.
QUANTIZATIONS = ("auto", "none", "int4", "fp8", "int8")
KV_DTYPES = ("auto", "fp8")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may set about the engine. None: chosen at load from the device and the model."""

    device: str = "auto"  # one of kernels.dispatch.DEVICES; auto: the CPU
    dtype: str = "auto"  # auto, bfloat16 or float32
    quantization: str = "auto"  # of weights: auto, none, int4, fp8 or int8 (see QUANTIZATIONS)
    kv_dtype: str = "auto"  # of the KV cache: auto is that of the model, or fp8
    max_num_batched_tokens: int | None = None  # token budget of one step
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None  # overrides kv_cache_bytes; tests use it to force preemption
    enable_prefix_cache: bool = True
    max_model_tokens: int | None = None  # lowers the model's context
    num_threads: int | None = None
    cpu_kernels: str = (
        "auto"  # the highest instruction set to use: auto, amx, avx512, avx2, or none for torch alone
    )
    static_batches: bool = (
        False  # for comparison only: in arrival order, a batch only when the last one has ended
    )
    record_steps: bool = False  # keep a StepRecord of every step


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


def to_plain(options: EngineOptions) -> dict[str, Any]:
    """The options as plain values, for the message to the engine process."""
    return {name: getattr(options, name) for name in EngineOptions.__slots__}
