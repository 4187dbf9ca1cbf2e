"""Paged attention on the CPU with torch's own flash kernel, where the C++ kernels can't be.

A step is cut once (attention_plan.py) into few large calls, merged by log-sum-exp. Keys lie head-major, [kv_heads,
num_blocks, block_size, head_dim]: a row's gathered blocks are one contiguous stream per head.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gristmill.kernels import reference
from gristmill.kernels.contract import AttentionBatch, Backend, HeadNorms, KVCache, KVSpec, RopeTables
from gristmill.kernels.torch.attention_plan import (
    AttentionPlan,
    DecodeCall,
    PrefillCall,
    PrefixCall,
    plan_calls,
)
from gristmill.kernels.torch.memory import zeros_on_use

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FP8 = torch.float8_e4m3fn


class TorchKVCache(KVCache):
    """storage: keys and values of each layer, [kv_heads, num_blocks, block_size, head_dim] each."""

    def __init__(self, backend: Backend, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(backend, spec, num_blocks)
        shape = (spec.num_kv_heads, num_blocks, spec.block_size, spec.head_dim)
        # Zeros: a block that is only padding is read, and must hold finite numbers.
        self.storage = [
            (zeros_on_use(shape, spec.dtype), zeros_on_use(shape, spec.dtype)) for _ in range(spec.num_layers)
        ]

    def append(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """See KVCache."""
        keys, values = self.storage[layer]
        num_tokens, head_dim = len(slot_mapping), self.spec.head_dim
        heads = qkv[:num_tokens].view(num_tokens, -1, head_dim)  # [T, H + 2 KVH, D]
        q, k, v = heads.split([self.spec.num_heads, len(keys), len(keys)], 1)
        cos, sin = (table[positions[:num_tokens]].unsqueeze(1) for table in rope)
        for part, weight in ((q, norms and norms.q), (k, norms and norms.k)):
            normed = part if norms is None else functional.rms_norm(part, (head_dim,), weight, norms.eps)
            part.copy_(reference.rope(normed, cos, sin))
        for side, (cache, new) in enumerate(((keys, k), (values, v))):
            rounded = new.transpose(0, 1)  # [KVH, T, D]
            if self.spec.scales is None:
                rounded = rounded.to(cache.dtype)
            else:
                scale = self.spec.scales[side][layer][:, None, None]
                rounded = reference.to_fp8(rounded, scale).view(torch.uint8)
            flat = cache.view(rounded.dtype).view(len(cache), -1, head_dim)
            flat.index_copy_(1, slot_mapping, rounded)

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """See KVCache."""
        return plan_calls(batch, self.spec.block_size)

    def attend(self, layer: int, qkv: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """See KVCache."""
        (keys, values), num_heads, scales = self.storage[layer], self.spec.num_heads, self.spec.scales
        q: Tensor = qkv[:, : num_heads * keys.shape[-1]].unflatten(1, (num_heads, -1))  # [T, H, D]
        q = q.to(keys.dtype) if scales is None else q.float() * _spread(scales.keys[layer], num_heads)
        out = q.new_empty(q.shape)
        out[plan.num_tokens :] = 0
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if plan.prefixes else None
        for decode in plan.decodes:
            _run_decode(keys, values, q, decode, scale, out, lse)
        for prefill in plan.prefills:
            _run_prefill(keys, values, q, prefill, scale, out, lse)
        for prefix in plan.prefixes:
            assert lse is not None
            _merge_prefix(keys, values, q, prefix, scale, out, lse)
        if scales is not None:
            out *= _spread(scales.values[layer], num_heads)
        return out.view(len(qkv), q.shape[1] * q.shape[2]).to(qkv.dtype)

    def largest(self) -> Tensor:
        """See KVCache."""
        sides = zip(*self.storage, strict=True)
        return torch.stack([torch.stack([t.float().abs().amax((1, 2, 3)) for t in side]) for side in sides])

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """See KVCache."""
        for source, target in pairs.tolist():
            for caches in self.storage:
                for cache in caches:
                    cache[:, target] = cache[:, source]


def _run_decode(
    keys: Tensor, values: Tensor, q: Tensor, d: DecodeCall, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    num_rows, kv_heads = len(d.rows), keys.shape[0]
    k, v = _gather(keys, d.blocks, num_rows), _gather(values, d.blocks, num_rows)
    grouped = q.index_select(0, d.rows).view(num_rows, kv_heads, -1, q.shape[-1])  # [n, KVH, G, D]
    o, l_own = _FLASH(grouped, k, v, attn_mask=d.mask.to(q.dtype), scale=scale)
    out.index_copy_(0, d.rows, o.reshape(num_rows, *q.shape[1:]))
    if lse is not None:
        lse.index_copy_(0, d.rows, l_own.reshape(num_rows, -1))


def _run_prefill(
    keys: Tensor, values: Tensor, q: Tensor, p: PrefillCall, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    n = p.num_sequences
    k, v = _gather(keys, p.blocks, n), _gather(values, p.blocks, n)
    padded = q.index_select(0, p.gather).view(n, -1, *q.shape[1:]).transpose(1, 2)  # [n, H, Lq, D]
    if p.mask is None:
        k, v = k[:, :, : padded.shape[2]], v[:, :, : padded.shape[2]]
        o, l_own = _FLASH(padded, k, v, is_causal=True, scale=scale)
    else:
        o, l_own = _FLASH(padded, k, v, attn_mask=p.mask.to(q.dtype), scale=scale)
    flat = o.transpose(1, 2).reshape(-1, *q.shape[1:])
    out.index_copy_(0, p.scatter, flat.index_select(0, p.valid))
    if lse is not None:
        l_flat = l_own.transpose(1, 2).reshape(-1, q.shape[1])
        lse.index_copy_(0, p.scatter, l_flat.index_select(0, p.valid))


def _merge_prefix(
    keys: Tensor, values: Tensor, q: Tensor, p: PrefixCall, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Adds the prefix's share: softmax over both parts is their mean weighted by exp(lse). Updates lse."""
    rows = q[p.rows].transpose(0, 1).unsqueeze(0)  # [1, H, T, D]
    o, l_prefix = _FLASH(rows, _gather(keys, p.blocks, 1), _gather(values, p.blocks, 1), scale=scale)
    l_prefix = l_prefix[0].transpose(0, 1)  # [T, H]
    weight = torch.sigmoid(l_prefix - lse[p.rows]).unsqueeze(-1).to(q.dtype)  # [T, H, 1]
    out[p.rows] = torch.lerp(out[p.rows], o[0].transpose(0, 1), weight)
    lse[p.rows] = torch.logaddexp(l_prefix, lse[p.rows])


def _gather(cache: Tensor, blocks: Tensor, num_rows: int) -> Tensor:
    """[num_rows, kv_heads, tokens, head_dim] of the rows' blocks, row after row in `blocks`; codes as float32."""
    kv_heads, _, _, head_dim = cache.shape
    if cache.dtype == _FP8:
        gathered = cache.view(torch.uint8).index_select(1, blocks).view(_FP8).float()
    else:
        gathered = cache.index_select(1, blocks)
    return gathered.view(kv_heads, num_rows, -1, head_dim).transpose(0, 1)


def _spread(scales: Tensor, num_heads: int) -> Tensor:
    """[num_heads, 1] of the KV heads' scales."""
    return scales.repeat_interleave(num_heads // len(scales))[:, None]
