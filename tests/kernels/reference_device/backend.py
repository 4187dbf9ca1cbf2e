"""The Backend that wraps gristmill.kernels.reference; registered as a line in dispatch.DEVICES."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernels import reference
from gristmill.kernels.contract import AttentionBatch, Backend, HeadNorms, KVCache, KVSpec, RopeTables
from gristmill.kernels.linear import Finish, LinearPart
from gristmill.kernels.quantized import Weight


def build_backend(cap: str = "auto") -> Backend:
    """The one of this device; there is nothing that `cap` could cap."""
    return ReferenceBackend()


class ReferenceBackend(Backend):
    """Each operation by its oracle, in float32."""

    device = torch.device("cpu")
    instructions = "reference"

    def linear_part(self, weight: Weight, bias: Tensor | None) -> LinearPart:
        return _ReferenceLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def argmax(self, logits: Tensor) -> Tensor:
        return reference.argmax(logits)

    def kv_cache(self, spec: KVSpec, num_blocks: int) -> KVCache:
        return _ReferenceKVCache(self, spec, num_blocks)

    def available_bytes(self) -> int:
        return 1 << 30

    def report_slow_paths(self, dtype: torch.dtype) -> None:
        pass


class _ReferenceLinear(LinearPart):
    def __init__(self, weight: Weight, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_weights = self.out_features * self.in_features
        self.weight, self.bias, self.num_bytes = reference.weight_values(weight), bias, 8 * self.num_weights

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        return reference.linear(x, self.weight, self.bias, finish, other).to(x.dtype)


class _ReferenceKVCache(KVCache):
    """keys, values: [num_layers, num_blocks * block_size, num_kv_heads, head_dim], as FP8 codes stand for them."""

    def __init__(self, backend: Backend, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(backend, spec, num_blocks)
        dtype = torch.float32 if spec.scales is not None else spec.dtype
        shape = (spec.num_layers, num_blocks * spec.block_size, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def append(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        spec, num_tokens = self.spec, len(slot_mapping)
        turned = reference.turn_heads(
            qkv[:num_tokens], spec.num_heads, spec.num_kv_heads, positions[:num_tokens], rope, norms
        )
        qkv[:num_tokens] = torch.cat(turned, 1).flatten(1)
        for side, (cache, new) in enumerate(((self.keys, turned[1]), (self.values, turned[2]))):
            stored = new if spec.scales is None else reference.round_kv(new, spec.scales[side][layer])
            cache[layer, slot_mapping] = stored.to(cache.dtype)

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def attend(self, layer: int, qkv: Tensor, plan: Any, scale: float) -> Tensor:
        num_tokens, width = int(plan.query_start_loc[-1]), self.spec.num_heads * self.spec.head_dim
        out = qkv.new_zeros(len(qkv), width)
        q = qkv[:num_tokens, :width].unflatten(1, (self.spec.num_heads, -1))
        keys, values = self.keys[layer], self.values[layer]
        out[:num_tokens] = reference.paged_attention(q, keys, values, plan, self.spec.block_size).flatten(1)
        return out

    def largest(self) -> Tensor:
        return torch.stack([side.float().abs().amax((1, 3)) for side in (self.keys, self.values)])

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        for source, target in pairs.tolist():
            for side in (self.keys, self.values):
                blocks = side.unflatten(1, (-1, self.spec.block_size))
                blocks[:, target] = blocks[:, source]
