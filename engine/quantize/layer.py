"""One decoder layer in float32, and what its linear layers see: the inputs that GPTQ and AWQ need.

The layer is that of the engine's own decoder; what is observed are the inputs of its linears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gristmill.engine.config import BLOCK_SIZE, ModelConfig
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.decoder import LayerLoader
from gristmill.engine.model.rope import build_rope_tables
from gristmill.kernels.contract import AttentionBatch, KVSpec, LayerStack, LayerWeights, RopeTables
from gristmill.kernels.dispatch import choose_backend
from gristmill.kernels.linear import Finish, Linear

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
        x = x.to(self.gram)
        self.gram.addmm_(x.T, x)
        self.total += x.abs().sum(0)
        self.num_tokens += len(x)


@dataclass(slots=True)
class InputObserver:
    """Gathers InputStats by the first linear layer of each group of INPUT_GROUPS."""

    stats: dict[str, InputStats] = field(default_factory=dict)

    def __call__(self, name: str, x: Tensor) -> None:
        if name not in self.stats:
            size = x.shape[1]
            self.stats[name] = InputStats(torch.zeros(size, size), torch.zeros(size))
        self.stats[name].add(x)

    def means(self, name: str) -> tuple[Tensor, Tensor]:
        """The means of x x^T and of |x|."""
        stats = self.stats[name]
        return stats.gram / stats.num_tokens, stats.total / stats.num_tokens


class LayerRunner:
    """Runs the decoder's layers one at a time, in float32, over sequences of equal length from position 0 on."""

    def __init__(self, config: ModelConfig, num_tokens: int) -> None:
        try:
            self._backend = choose_backend()
        except ValueError as error:
            raise ModelRefused(str(error)) from error
        self._config = config
        tables = build_rope_tables(config, num_tokens)
        self._rope = RopeTables(*(table.to(self._backend.device) for table in tables))

    def run(self, weights: Weights, hidden: Tensor, observe: Observe | None = None) -> Tensor:
        """The hidden states after the layer: [num_sequences, num_tokens, hidden_size] float32, as those before it."""
        loader = LayerLoader(self._config, self._backend, torch.float32)
        for name, weight in weights.items():
            loader.take(f"model.layers.0.{name}", weight)
        layer = loader.layer(0)
        size = max(1, BATCH_TOKENS // hidden.shape[1])
        return torch.cat([self._step(layer, part, observe) for part in hidden.split(size)])

    def _step(self, layer: LayerWeights, x: Tensor, observe: Observe | None) -> Tensor:
        num_sequences, length, _ = x.shape
        num_tokens, num_blocks = num_sequences * length, -(-length // BLOCK_SIZE)
        batch = AttentionBatch(
            np.arange(num_sequences + 1) * length,
            np.full(num_sequences, length),
            np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, num_blocks),
            sliding_window=self._config.sliding_window,
        )
        c, backend = self._config, self._backend
        spec = KVSpec(1, c.num_heads, c.num_kv_heads, c.head_dim, BLOCK_SIZE, torch.float32)
        cache = backend.kv_cache(spec, num_sequences * num_blocks)
        inputs = cache.build_input(np.zeros(num_tokens, np.int64), batch, backend.round_rows(num_tokens))
        padded = torch.zeros(len(inputs.input_ids), c.hidden_size, device=backend.device)
        padded[:num_tokens] = x.flatten(0, 1)
        if observe is not None:
            layer = _observed(layer, observe, num_tokens)
        stack = LayerStack(backend, [layer], self._rope, c.rms_norm_eps, backend.round_rows)
        return stack.run(padded, inputs, cache).view(x.shape).to(x)


class _ObservedLinear(Linear):
    """A linear that shows the first num_tokens rows of its inputs, which are not padding."""

    def __init__(self, linear: Linear, name: str, observe: Observe, num_tokens: int) -> None:
        super().__init__(linear.parts)
        self._name, self._observe, self._num_tokens = name, observe, num_tokens

    def __call__(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        self._observe(self._name, x[: self._num_tokens])
        return super().__call__(x, finish, other)


def _observed(layer: LayerWeights, observe: Observe, num_tokens: int) -> LayerWeights:
    """The same layer; `observe` gets the input of each group of INPUT_GROUPS, by the group's first name."""
    names = [group[0] for group in INPUT_GROUPS]
    qkv, output, gated, down = (
        _ObservedLinear(linear, name, observe, num_tokens)
        for linear, name in zip(layer.linears, names, strict=True)
    )
    return replace(layer, qkv=qkv, output=output, gated=gated, down=down)
