"""The one decoder: RMS norm, rotary attention with grouped heads, gated MLP, described by the flags of ModelConfig.

It computes hidden states and logits of one step. What the step is, is decided elsewhere; how a KV block looks inside
is the kernels' business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import ModelRefused
from engine.rope import build_rope_tables
from kernels import ops
from kernels.linear import Linear, round_rows, warm_sizes

MAX_HEAD_ROWS = 256  # logits are made for so many tokens at a time: 256 x 49,152 float32 are 50 MB


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; q_norm and k_norm: [head_dim] where the architecture has them."""

    input_norm: Tensor
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate: Linear
    up: Linear
    down: Linear


class Model:
    """Weights on the device, ready to run. weights: pairs (Hugging Face name, tensor) in any order."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        self.config = config
        self.cos, self.sin = build_rope_tables(config, num_positions, dtype)
        self.scale = config.head_dim**-0.5
        loader = _LayerLoader(config)
        for name, tensor in weights:
            loader.take(name, tensor)
        self.layers = loader.layers()
        self.embedding = loader.pop("model.embed_tokens.weight")
        self.final_norm = loader.pop("model.norm.weight")
        head = None if config.tie_embeddings else loader.pop("lm_head.weight")
        self.head = Linear(self.embedding if head is None else head)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, cache: ops.KVCache, plan: Any
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last layer, before the final norm.

        input_ids, positions: [padded_tokens] int64; slot_mapping: [num_tokens]; rows after num_tokens are padding.
        """
        x = self.embedding[input_ids]
        cos, sin = self.cos[positions], self.sin[positions]
        for index, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.input_norm, self.config.rms_norm_eps)
            attended = self._attend(index, layer, h, cos, sin, slot_mapping, cache, plan)
            x = layer.output.add(attended, x)
            h = ops.rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
            x = layer.down.add(layer.up.mul(h, layer.gate.silu(h)), x)
        return x[: len(slot_mapping)]

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_tokens, vocab_size] of hidden: [num_tokens, hidden_size]; at most MAX_HEAD_ROWS tokens."""
        assert len(hidden) <= MAX_HEAD_ROWS, f"{len(hidden)} rows for the head, at most {MAX_HEAD_ROWS}"
        normed = ops.rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)
        padding = round_rows(len(hidden)) - len(hidden)
        if padding:
            normed = torch.nn.functional.pad(normed, (0, 0, 0, padding))
        return self.head(normed)[: len(hidden)]

    def step_seconds(self, num_rows: int) -> float:
        """How long the linear layers of a step of this many tokens take, by one layer's time."""
        self._run_linears(num_rows)  # code generation is not part of it
        start = time.perf_counter()
        self._run_linears(num_rows)
        return (time.perf_counter() - start) * self.config.num_layers

    def warm(self, max_rows: int) -> None:
        """Runs every row count once through one layer and the head, so that no step waits for code generation."""
        for rows in warm_sizes(max_rows):
            self._run_linears(rows)
        for rows in warm_sizes(min(max_rows, MAX_HEAD_ROWS)):
            self.logits(torch.zeros(rows, self.config.hidden_size, dtype=self.embedding.dtype))

    def _run_linears(self, num_rows: int) -> None:
        layer, size = self.layers[0], self.config.num_heads * self.config.head_dim
        x = torch.zeros(num_rows, self.config.hidden_size, dtype=self.embedding.dtype)
        layer.qkv(x)
        layer.output.add(x.new_zeros(num_rows, size), x)
        layer.down.add(layer.up.mul(x, layer.gate.silu(x)), x)

    def _attend(
        self,
        index: int,
        layer: Layer,
        h: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        cache: ops.KVCache,
        plan: Any,
    ) -> Tensor:
        c = self.config
        heads = layer.qkv(h).view(len(h), -1, c.head_dim)  # [T, H + 2 KVH, D]
        qk, v = heads.split([c.num_heads + c.num_kv_heads, c.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(qk[:, : c.num_heads], layer.q_norm, c.rms_norm_eps)
            k = ops.rms_norm(qk[:, c.num_heads :], layer.k_norm, c.rms_norm_eps)
            qk = torch.cat([q, k], 1)
        q, k = ops.rope(qk, cos, sin).split([c.num_heads, c.num_kv_heads], 1)
        num_tokens = len(slot_mapping)
        cache.write(index, k[:num_tokens], v[:num_tokens], slot_mapping)
        return cache.attend(index, q, plan, self.scale).view(len(h), -1)


class _LayerLoader:
    """Takes tensors in any order and packs a linear as soon as its parts are there, so that few are held twice."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.parts: dict[str, Tensor] = {}
        self.linears: dict[str, Linear] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        self.parts[name] = tensor
        prefix, _, rest = name.rpartition(".layers.")
        if not prefix:
            return
        number, _, rest = rest.partition(".")
        base = f"{prefix}.layers.{number}."
        if rest.startswith("self_attn.") and rest.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
            self._pack(base + "qkv", [f"{base}self_attn.{p}_proj" for p in "qkv"], self.config.qkv_bias)
        elif rest.startswith("self_attn.o_proj"):
            self._pack(base + "self_attn.o_proj", [base + "self_attn.o_proj"], self.config.output_bias)
        elif rest.startswith("mlp."):
            linear = base + ".".join(rest.split(".")[:2])
            self._pack(linear, [linear], self.config.mlp_bias)

    def layers(self) -> list[Layer]:
        """The layers, in order. Raises ModelRefused naming what is missing."""
        return [self._layer(f"model.layers.{i}.") for i in range(self.config.num_layers)]

    def pop(self, name: str) -> Tensor:
        """One tensor that is not part of a linear layer."""
        if name not in self.parts:
            raise ModelRefused(
                f"the weights have no tensor {name!r}; the checkpoint is incomplete, get it again"
            )
        return self.parts.pop(name)

    def _layer(self, base: str) -> Layer:
        qk_norm = self.config.qk_norm
        return Layer(
            input_norm=self.pop(base + "input_layernorm.weight"),
            qkv=self._linear(base + "qkv"),
            q_norm=self.pop(base + "self_attn.q_norm.weight") if qk_norm else None,
            k_norm=self.pop(base + "self_attn.k_norm.weight") if qk_norm else None,
            output=self._linear(base + "self_attn.o_proj"),
            mlp_norm=self.pop(base + "post_attention_layernorm.weight"),
            gate=self._linear(base + "mlp.gate_proj"),
            up=self._linear(base + "mlp.up_proj"),
            down=self._linear(base + "mlp.down_proj"),
        )

    def _linear(self, name: str) -> Linear:
        if name not in self.linears:
            raise ModelRefused(
                f"the weights of {name!r} are missing; the checkpoint is incomplete, get it again"
            )
        return self.linears.pop(name)

    def _pack(self, name: str, sources: list[str], has_bias: bool) -> None:
        """Packs the linear `name` from its sources, once all of their tensors are there."""
        needed = [
            f"{s}.{kind}" for s in sources for kind in (("weight", "bias") if has_bias else ("weight",))
        ]
        if not all(n in self.parts for n in needed):
            return
        tensors = {n: self.parts.pop(n) for n in needed}
        weight = torch.cat([tensors[f"{s}.weight"] for s in sources])
        bias = torch.cat([tensors[f"{s}.bias"] for s in sources]) if has_bias else None
        self.linears[name] = Linear(weight, bias)
