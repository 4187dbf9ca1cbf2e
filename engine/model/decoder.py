"""The one decoder: RMS norm, rotary attention with grouped heads, gated MLP, described by the flags of ModelConfig.

It computes hidden states and logits of one step. What the step is, is decided elsewhere; how a KV block looks inside
is the kernels' business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.rope import build_rope_tables
from gristmill.kernels import ops
from gristmill.kernels.cpu.layers import LayerWeights, build_layers
from gristmill.kernels.cpu.library import NO_CPU_KERNELS, CpuKernels
from gristmill.kernels.cpu.linear import activation_dtype
from gristmill.kernels.linear import GatedLinear, Linear, round_rows, warm_sizes
from gristmill.kernels.quantized import QuantizedTensor

Packed = TypeVar("Packed", Linear, GatedLinear)
Weight = Tensor | QuantizedTensor
# Logits are made for few enough tokens at a time that malloc keeps their memory for the next ones: it gives larger
# pieces back to the system, and clearing fresh pages takes a fifth of the time of making logits.
MAX_LOGITS_BYTES = 32 << 20
MIN_HEAD_ROWS, MAX_HEAD_ROWS = 64, 256  # not so few that reading the head's weights takes the time


class Model:
    """Weights on the device, ready to run. weights: pairs (Hugging Face name, weight) in any order.

    A weight is a tensor of `dtype` or, of a linear layer or the embeddings, a QuantizedTensor. Where the CPU can't
    multiply bfloat16, weights and KV cache of that type are read as such and all else is float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: torch.dtype,
        num_positions: int,
        kernels: CpuKernels = NO_CPU_KERNELS,
    ) -> None:
        self.config, self.kernels = config, kernels
        self.dtype = activation_dtype(kernels, dtype)
        self.pointwise = ops.Pointwise(kernels)
        self.rope = build_rope_tables(config, num_positions)
        self.scale = config.head_dim**-0.5
        loader = _LayerLoader(config, kernels, self.dtype)
        for name, tensor in weights:
            loader.take(name, tensor)
        self.layers = loader.layers()
        self._compiled = build_layers(
            kernels, self.layers, config.rms_norm_eps, config.num_heads, config.head_dim, self.dtype
        )
        embedding = loader.pop("model.embed_tokens.weight")
        self.final_norm = loader.pop_tensor("model.norm.weight").to(self.dtype)
        head = embedding if config.tie_embeddings else loader.pop("lm_head.weight")
        self.head = Linear(head, None, kernels)
        self.max_head_rows = max_head_rows(config.vocab_size)
        # A tied head that is held in codes has the embeddings, too.
        self.embedding = None if head is embedding and self.head.has_rows else embedding

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cache: ops.KVCache,
        plan: Any,
        kept: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last layer, before the final norm.

        input_ids, positions: [padded_tokens] int64; slot_mapping: [num_tokens]; rows after num_tokens are padding.
        kept: the tokens whose hidden states are wanted, ascending int64, [num_kept, hidden_size] then. The last layer
        gives the others keys and values and nothing else.
        """
        c, num_tokens = self.config, len(slot_mapping)
        x = self._embed(input_ids)
        if kept is not None and len(kept) == num_tokens:
            kept = None
        if self._compiled is not None and len(x) == num_tokens:
            return self._compiled.run(
                x, cache.storage, self.rope, positions, slot_mapping, plan, self.scale, kept
            )
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm))
            cache.append(index, qkv, self.rope, positions, slot_mapping, c.num_heads, layer.head_norms)
            attended = cache.attend(index, qkv, plan, self.scale, c.num_heads)
            if kept is not None and index == c.num_layers - 1:
                num_tokens = len(kept)
                if not num_tokens:
                    return x[:0]
                kept = functional.pad(kept, (0, self.padded_rows(num_tokens) - num_tokens))
                attended, x = attended[kept], x[kept]
            x = layer.output.add(attended, x)
            x = layer.down.add(layer.gated(self._norm(x, layer.mlp_norm)), x)
        return x[:num_tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_tokens, vocab_size] of hidden: [num_tokens, hidden_size]; at most max_head_rows tokens."""
        assert len(hidden) <= self.max_head_rows, f"{len(hidden)} rows for the head of {self.max_head_rows}"
        normed = self._norm(hidden, self.final_norm)
        padding = self.padded_rows(len(hidden)) - len(hidden)
        if padding:
            normed = functional.pad(normed, (0, 0, 0, padding))
        return self.head(normed)[: len(hidden)]

    @property
    def linear_bits(self) -> float:
        """Bits of a weight of the layers' linears, their scales and offsets included."""
        layer = self.layers[0]
        linears = (layer.qkv, layer.output, layer.gated, layer.down)
        num_weights = sum(each.num_weights for each in linears)
        return sum(each.bits_per_weight * each.num_weights for each in linears) / num_weights

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows that linears are called with for `num_rows` tokens."""
        return round_rows(num_rows, self.head.any_rows)

    def step_seconds(self, num_rows: int) -> float:
        """How long the linear layers of a step of this many tokens take, by one layer's time."""
        self._run_linears(num_rows)  # code generation is not part of it
        start = time.perf_counter()
        self._run_linears(num_rows)
        return (time.perf_counter() - start) * self.config.num_layers

    def warm(self, max_rows: int) -> None:
        """Runs every row count once through one layer and the head, so that no step waits for code generation."""
        for rows in warm_sizes(max_rows, self.head.any_rows):
            self._run_linears(rows)
        for rows in warm_sizes(min(max_rows, self.max_head_rows), self.head.any_rows):
            self.logits(torch.zeros(rows, self.config.hidden_size, dtype=self.dtype))

    def _embed(self, input_ids: Tensor) -> Tensor:
        if self.embedding is None:
            return self.head.take_rows(input_ids).to(self.dtype)
        if isinstance(self.embedding, QuantizedTensor):
            return self.embedding.take_rows(input_ids).dequantize().to(self.dtype)
        return self.embedding[input_ids].to(self.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.pointwise.rms_norm(x, weight, self.config.rms_norm_eps)

    def _run_linears(self, num_rows: int) -> None:
        layer, size = self.layers[0], self.config.num_heads * self.config.head_dim
        x = torch.zeros(num_rows, self.config.hidden_size, dtype=self.dtype)
        layer.qkv(x)
        layer.output.add(x.new_zeros(num_rows, size), x)
        layer.down.add(layer.gated(x), x)


def max_head_rows(vocab_size: int) -> int:
    """For how many tokens at a time logits are made: a number that linears are called with as it is (round_rows)."""
    rows = MAX_LOGITS_BYTES // (4 * vocab_size) // MIN_HEAD_ROWS * MIN_HEAD_ROWS
    return min(max(rows, MIN_HEAD_ROWS), MAX_HEAD_ROWS)


class _LayerLoader:
    """Takes tensors in any order and packs a linear as soon as its parts are there, so that few are held twice."""

    def __init__(self, config: ModelConfig, kernels: CpuKernels, dtype: torch.dtype) -> None:
        self.config, self.kernels, self.dtype = config, kernels, dtype
        self.parts: dict[str, Weight] = {}
        self.linears: dict[str, Linear] = {}
        self.gated: dict[str, GatedLinear] = {}

    def take(self, name: str, weight: Weight) -> None:
        self.parts[name] = weight
        prefix, _, rest = name.rpartition(".layers.")
        if not prefix:
            return
        number, _, rest = rest.partition(".")
        base = f"{prefix}.layers.{number}."
        if rest.startswith("self_attn.") and rest.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
            self._pack(base + "qkv", [f"{base}self_attn.{p}_proj" for p in "qkv"], self.config.qkv_bias)
        elif rest.startswith("self_attn.o_proj"):
            self._pack(base + "self_attn.o_proj", [base + "self_attn.o_proj"], self.config.output_bias)
        elif rest.startswith("mlp.down_proj"):
            self._pack(base + "mlp.down_proj", [base + "mlp.down_proj"], self.config.mlp_bias)
        elif rest.startswith("mlp."):
            self._pack_gated(base + "mlp.")

    def layers(self) -> list[LayerWeights]:
        """The layers, in order. Raises ModelRefused naming what is missing."""
        return [self._layer(f"model.layers.{i}.") for i in range(self.config.num_layers)]

    def pop(self, name: str) -> Weight:
        """One weight that is not part of a layer's linears."""
        if name not in self.parts:
            raise ModelRefused(
                f"the weights have no tensor {name!r}; the checkpoint is incomplete, get it again"
            )
        return self.parts.pop(name)

    def pop_tensor(self, name: str) -> Tensor:
        """The same, of a weight that is never quantized."""
        weight = self.pop(name)
        assert isinstance(weight, Tensor), f"{name} is in codes"
        return weight

    def _layer(self, base: str) -> LayerWeights:
        return LayerWeights(
            input_norm=self.pop_tensor(base + "input_layernorm.weight").to(self.dtype),
            qkv=self._take(self.linears, base + "qkv"),
            head_norms=self._head_norms(base) if self.config.qk_norm else None,
            output=self._take(self.linears, base + "self_attn.o_proj"),
            mlp_norm=self.pop_tensor(base + "post_attention_layernorm.weight").to(self.dtype),
            gated=self._take(self.gated, base + "mlp."),
            down=self._take(self.linears, base + "mlp.down_proj"),
        )

    def _head_norms(self, base: str) -> ops.HeadNorms:
        q, k = (self.pop_tensor(f"{base}self_attn.{name}_norm.weight").to(self.dtype) for name in "qk")
        return ops.HeadNorms(q, k, self.config.rms_norm_eps)

    def _take(self, packed: dict[str, Packed], name: str) -> Packed:
        if name not in packed:
            raise ModelRefused(
                f"the weights of {name!r} are missing; the checkpoint is incomplete, get it again"
            )
        return packed.pop(name)

    def _pack(self, name: str, sources: list[str], has_bias: bool) -> None:
        """Packs the linear `name` from its sources, once all of their tensors are there."""
        tensors = self._pop_all([f"{s}.{kind}" for s in sources for kind in _kinds(has_bias)])
        if tensors is None:
            return
        bias = torch.cat([_plain(tensors[f"{s}.bias"]) for s in sources]) if has_bias else None
        self.linears[name] = Linear([tensors[f"{s}.weight"] for s in sources], bias, self.kernels)

    def _pack_gated(self, base: str) -> None:
        """Packs gate and up together, once both are there."""
        kinds = _kinds(self.config.mlp_bias)
        tensors = self._pop_all([f"{base}{name}_proj.{kind}" for name in ("gate", "up") for kind in kinds])
        if tensors is not None:
            gate, up = (tensors[f"{base}{name}_proj.weight"] for name in ("gate", "up"))
            gate_bias, up_bias = (_plain(tensors.get(f"{base}{name}_proj.bias")) for name in ("gate", "up"))
            self.gated[base] = GatedLinear(gate, up, gate_bias, up_bias, self.kernels)

    def _pop_all(self, names: list[str]) -> dict[str, Weight] | None:
        if not all(name in self.parts for name in names):
            return None
        return {name: self.parts.pop(name) for name in names}


def _plain(bias: Weight | None) -> Any:
    assert not isinstance(bias, QuantizedTensor), "a bias is in codes"
    return bias


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)
