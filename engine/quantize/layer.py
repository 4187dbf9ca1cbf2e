"""One decoder layer in plain float32, and what its linear layers see: the inputs that GPTQ and AWQ need.

Works on whole sequences without a KV cache; the engine's own forward pass is in engine/model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.engine.config import ModelConfig
from gristmill.kernels import reference
from gristmill.kernels.contract import RopeTables

Weights = Mapping[str, Tensor]  # of one layer, by name without `model.layers.N.`
Observe = Callable[[str, Tensor], None]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = "self_attn.o_proj"
GATED = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
INPUT_GROUPS = (QKV, (OUTPUT,), GATED, (DOWN,))  # linear layers that read the same input
LINEARS = tuple(name for group in INPUT_GROUPS for name in group)
BATCH_TOKENS = 4096  # that go through a layer at a time


@dataclass(slots=True)
class InputStats:
    """Sums over the inputs of linear layers. gram: x x^T [num_columns, num_columns]; total: |x| [num_columns]."""

    gram: Tensor
    total: Tensor
    num_tokens: int = 0

    def add(self, x: Tensor) -> None:
        """x: [num_tokens, num_columns]."""
        self.gram.addmm_(x.T, x)
        self.total += x.abs().sum(0)
        self.num_tokens += len(x)


@dataclass(slots=True)
class InputObserver:
    """Gathers InputStats by the first linear layer of each group of INPUT_GROUPS."""

    stats: dict[str, InputStats] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1])
        if name not in self.stats:
            size = flat.shape[1]
            self.stats[name] = InputStats(torch.zeros(size, size), torch.zeros(size))
        self.stats[name].add(flat)

    def means(self, name: str) -> tuple[Tensor, Tensor]:
        """The means of x x^T and of |x|."""
        stats = self.stats[name]
        return stats.gram / stats.num_tokens, stats.total / stats.num_tokens


def ignore_inputs(name: str, x: Tensor) -> None:
    """Observes nothing."""


def run_sequences(
    config: ModelConfig, weights: Weights, hidden: Tensor, rope: RopeTables, observe: Observe = ignore_inputs
) -> Tensor:
    """The layer over all sequences, some at a time. hidden: [num_sequences, num_tokens, hidden_size] float32."""
    step = max(1, BATCH_TOKENS // hidden.shape[1])
    result = torch.empty_like(hidden)
    for start in range(0, len(hidden), step):
        result[start : start + step] = run_layer(config, weights, hidden[start : start + step], rope, observe)
    return result


def run_layer(
    config: ModelConfig, weights: Weights, x: Tensor, rope: RopeTables, observe: Observe = ignore_inputs
) -> Tensor:
    """The hidden states after the layer. x: [batch, num_tokens, hidden_size] float32, from position 0 on."""
    normed = reference.rms_norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
    observe(QKV[0], normed)
    attended = _attention(config, weights, normed, rope)
    observe(OUTPUT, attended)
    x = x + _linear(weights, OUTPUT, attended)
    normed = reference.rms_norm(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    observe(GATED[0], normed)
    gate, up = (_linear(weights, name, normed) for name in GATED)
    inner = functional.silu(gate) * up
    observe(DOWN, inner)
    return x + _linear(weights, DOWN, inner)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _attention(config: ModelConfig, weights: Weights, x: Tensor, rope: RopeTables) -> Tensor:
    """What the attention's heads return: [batch, num_tokens, num_heads * head_dim]."""
    batch, num_tokens, _ = x.shape
    assert config.sliding_window is None or num_tokens <= config.sliding_window, "sequences fit the window"
    q, k, v = (
        _linear(weights, name, x).view(batch, num_tokens, -1, config.head_dim) for name in QKV
    )  # [B, T, heads, D]
    if config.qk_norm:
        q = reference.rms_norm(q, weights["self_attn.q_norm.weight"], config.rms_norm_eps)
        k = reference.rms_norm(k, weights["self_attn.k_norm.weight"], config.rms_norm_eps)
    cos, sin = rope.cos[:num_tokens, None], rope.sin[:num_tokens, None]
    q, k = reference.rope(q, cos, sin), reference.rope(k, cos, sin)
    result = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )  # [B, heads, T, D]
    return result.transpose(1, 2).reshape(batch, num_tokens, -1)
