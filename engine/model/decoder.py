"""The one decoder: RMS norm, rotary attention with grouped heads, gated MLP, described by the flags of ModelConfig.

It computes hidden states and logits of one step. What the step is, is decided elsewhere; how a KV block looks inside
is the kernels' business.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gristmill.engine.config import BLOCK_SIZE, ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.rope import build_rope_tables
from gristmill.kernels.contract import (
    AttentionBatch,
    Backend,
    HeadNorms,
    KVCache,
    KVScales,
    KVSpec,
    LayerWeights,
    ModelInput,
    RopeTables,
)
from gristmill.kernels.linear import Linear
from gristmill.kernels.quantized import QuantizedTensor, Weight

# Logits are made for few enough tokens at a time that malloc keeps their memory for the next ones: it gives larger
# pieces back to the system, and clearing fresh pages takes a fifth of the time of making logits.
MAX_LOGITS_BYTES = 32 << 20
MIN_HEAD_ROWS, MAX_HEAD_ROWS = 64, 256  # not so few that reading the head's weights takes the time


class Model:
    """Weights on the backend's device, ready to run. weights: pairs (Hugging Face name, weight) in any order.

    A weight is a tensor of `dtype` or, of a linear layer or the embeddings, a QuantizedTensor. Where the device can't
    multiply bfloat16, weights and KV cache of that type are read as such and all else is float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        dtype: torch.dtype,
        num_positions: int,
        backend: Backend,
    ) -> None:
        self.config, self.backend = config, backend
        self.dtype = backend.activation_dtype(dtype)
        loader = LayerLoader(config, backend, self.dtype)
        for name, tensor in weights:
            loader.take(name, tensor)
        self.layers = loader.layers()
        embedding = loader.pop("model.embed_tokens.weight")
        self.final_norm = loader.pop_norm("model.norm.weight")
        head = embedding if config.tie_embeddings else loader.pop("lm_head.weight")
        self.head = backend.linear(head)
        self.max_head_rows = max_head_rows(config.vocab_size)
        self.rope = RopeTables(*(t.to(backend.device) for t in build_rope_tables(config, num_positions)))
        self.stack = backend.layer_stack(self.layers, self.rope, config.rms_norm_eps, self.padded_rows)
        # A tied head that is held in codes has the embeddings, too.
        self.embedding = self.head if head is embedding and self.head.has_rows else embedding
        if isinstance(self.embedding, Tensor):
            self.embedding = self.embedding.to(backend.device)

    def kv_spec(self, dtype: torch.dtype, scales: KVScales | None = None) -> KVSpec:
        """What a KV cache of this model is made for."""
        c = self.config
        return KVSpec(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, BLOCK_SIZE, dtype, scales)

    def build_input(
        self,
        token_ids: NDArray[np.int64],
        batch: AttentionBatch,
        cache: KVCache,
        kept: NDArray[np.int64] | None = None,
    ) -> ModelInput:
        """The step of these tokens, sequence after sequence, on the device. kept: see ModelInput."""
        return cache.build_input(token_ids, batch, self.padded_rows(len(token_ids)), kept)

    def forward(self, inputs: ModelInput, cache: KVCache) -> Tensor:
        """Hidden states [num_tokens, hidden_size] after the last layer, before the final norm.

        Of inputs.kept, where it is given; the last layer gives the other tokens keys and values and nothing else.
        """
        if inputs.kept is not None and len(inputs.kept) == len(inputs.slot_mapping):
            inputs = replace(inputs, kept=None)
        return self.stack.run(embed(self.config, self.embedding, inputs.input_ids, self.dtype), inputs, cache)

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
        num_weights = sum(each.num_weights for each in layer.linears)
        return 8 * sum(each.num_bytes for each in layer.linears) / num_weights

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows that linears are called with for `num_rows` tokens."""
        return num_rows if self.head.any_rows else self.backend.round_rows(num_rows)

    def step_seconds(self, num_rows: int) -> float:
        """How long the linear layers of a step of this many tokens take, by one layer's time."""
        self._run_linears(num_rows)  # code generation is not part of it
        start = time.perf_counter()
        self._run_linears(num_rows)
        return (time.perf_counter() - start) * self.config.num_layers

    def warm(self, max_rows: int) -> None:
        """Runs every row count once through one layer and the head, so that no step waits for code generation."""
        if self.head.any_rows:
            return
        for rows in sorted({self.padded_rows(n) for n in range(1, max_rows + 1)}):
            self._run_linears(rows)
            if rows <= self.max_head_rows:
                self.logits(self._zeros(rows))

    def _zeros(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, self.config.hidden_size, dtype=self.dtype, device=self.backend.device)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.backend.rms_norm(x, weight, self.config.rms_norm_eps)

    def _run_linears(self, num_rows: int) -> None:
        layer, size = self.layers[0], self.config.num_heads * self.config.head_dim
        x = self._zeros(num_rows)
        layer.qkv(x)
        layer.output(x.new_zeros(num_rows, size), "add", x)
        layer.down(layer.gated(x), "add", x)


def embed(config: ModelConfig, table: Weight | Linear, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """What the first layer reads: [num_tokens, hidden_size] of `dtype`. table: the embeddings, or a head that has them.

    Flags of ModelConfig that act on embeddings act here. token_ids: [num_tokens] int64.
    """
    rows = table[token_ids] if isinstance(table, Tensor) else table.take_rows(token_ids)
    return (rows.dequantize() if isinstance(rows, QuantizedTensor) else rows).to(dtype)


def max_head_rows(vocab_size: int) -> int:
    """For how many tokens at a time logits are made: a number that linears are called with as it is (round_rows)."""
    rows = MAX_LOGITS_BYTES // (4 * vocab_size) // MIN_HEAD_ROWS * MIN_HEAD_ROWS
    return min(max(rows, MIN_HEAD_ROWS), MAX_HEAD_ROWS)


class LayerLoader:
    """Takes tensors in any order and packs a linear as soon as its parts are there, so that few are held twice."""

    def __init__(self, config: ModelConfig, backend: Backend, dtype: torch.dtype) -> None:
        self.config, self.backend, self.dtype = config, backend, dtype
        self.parts: dict[str, Weight] = {}
        self.linears: dict[str, Linear] = {}
        self.gated: dict[str, Linear] = {}

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
        return [self.layer(index) for index in range(self.config.num_layers)]

    def pop(self, name: str) -> Weight:
        """One weight that is not part of a layer's linears."""
        if name not in self.parts:
            raise ModelRefused(
                f"the weights have no tensor {name!r}; the checkpoint is incomplete, get it again"
            )
        return self.parts.pop(name)

    def pop_norm(self, name: str) -> Tensor:
        """The same, of a norm, which is never quantized: in the type of activations, on the device."""
        weight = self.pop(name)
        assert isinstance(weight, Tensor), f"{name} is in codes"
        return weight.to(self.backend.device, self.dtype)

    def layer(self, index: int) -> LayerWeights:
        """One layer."""
        base = f"model.layers.{index}."
        return LayerWeights(
            input_norm=self.pop_norm(base + "input_layernorm.weight"),
            qkv=self._take(self.linears, base + "qkv"),
            head_norms=self._head_norms(base) if self.config.qk_norm else None,
            output=self._take(self.linears, base + "self_attn.o_proj"),
            mlp_norm=self.pop_norm(base + "post_attention_layernorm.weight"),
            gated=self._take(self.gated, base + "mlp."),
            down=self._take(self.linears, base + "mlp.down_proj"),
        )

    def _head_norms(self, base: str) -> HeadNorms:
        q, k = (self.pop_norm(f"{base}self_attn.{name}_norm.weight") for name in "qk")
        return HeadNorms(q, k, self.config.rms_norm_eps)

    def _take(self, packed: dict[str, Linear], name: str) -> Linear:
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
        self.linears[name] = self.backend.linear([tensors[f"{s}.weight"] for s in sources], bias)

    def _pack_gated(self, base: str) -> None:
        """Packs gate and up together, once both are there."""
        kinds = _kinds(self.config.mlp_bias)
        tensors = self._pop_all([f"{base}{name}_proj.{kind}" for name in ("gate", "up") for kind in kinds])
        if tensors is not None:
            gate, up = (tensors[f"{base}{name}_proj.weight"] for name in ("gate", "up"))
            gate_bias, up_bias = (_plain(tensors.get(f"{base}{name}_proj.bias")) for name in ("gate", "up"))
            self.gated[base] = self.backend.gated_linear(gate, up, gate_bias, up_bias)

    def _pop_all(self, names: list[str]) -> dict[str, Weight] | None:
        if not all(name in self.parts for name in names):
            return None
        return {name: self.parts.pop(name) for name in names}


def _plain(bias: Weight | None) -> Any:
    assert not isinstance(bias, QuantizedTensor), "a bias is in codes"
    return bias


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)
