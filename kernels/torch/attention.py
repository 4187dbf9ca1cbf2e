"""Paged attention on the CPU with torch's own flash kernel, where the C++ kernels can't be.

A step is cut once (attention_plan.py) into few large calls, merged by log-sum-exp. Keys lie head-major, [kv_heads,
num_blocks, block_size, head_dim]: a row's gathered blocks are one contiguous stream per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.torch.attention_plan import (
    AttentionPlan,
    DecodeCall,
    PrefillCall,
    PrefixCall,
    plan_calls,
)
from gristmill.kernels.zeros import zeros_on_use

if TYPE_CHECKING:
    from gristmill.kernels.ops import AttentionBatch, HeadNorms, KVScales, RopeTables

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FP8 = torch.float8_e4m3fn


class Storage(list[tuple[Tensor, Tensor]]):
    """Keys and values of each layer; scales where they are FP8 codes."""

    scales: KVScales | None = None


def allocate_kv(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scales: KVScales | None = None,
) -> Storage:
    """Storage for keys and values. Zeroed: a block that is only padding is read, and must hold finite numbers."""
    shape = (num_kv_heads, num_blocks, block_size, head_dim)
    storage = Storage((zeros_on_use(shape, dtype), zeros_on_use(shape, dtype)) for _ in range(num_layers))
    storage.scales = scales
    return storage


def append(
    storage: Storage,
    layer: int,
    qkv: Tensor,
    rope: RopeTables,
    positions: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> None:
    """See KVCache.append."""
    keys, values = storage[layer]
    num_tokens, head_dim = len(slot_mapping), keys.shape[-1]
    heads = qkv[:num_tokens].view(num_tokens, -1, head_dim)  # [T, H + 2 KVH, D]
    q, k, v = heads.split([num_heads, len(keys), len(keys)], 1)
    cos, sin = (table[positions[:num_tokens]] for table in rope)
    for part, weight in ((q, norms and norms.q), (k, norms and norms.k)):
        normed = part if norms is None else functional.rms_norm(part, (head_dim,), weight, norms.eps)
        part.copy_(rotate(normed, cos, sin))
    for side, (cache, new) in enumerate(((keys, k), (values, v))):
        rounded = new.transpose(0, 1)  # [KVH, T, D]
        if storage.scales is None:
            rounded = rounded.to(cache.dtype)
        else:
            rounded = to_fp8(rounded, storage.scales[side][layer][:, None, None]).view(torch.uint8)
        flat = cache.view(rounded.dtype).view(len(cache), -1, head_dim)
        flat.index_copy_(1, slot_mapping, rounded)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """The codes nearest to x / scale, at most 448 in size; a NaN stays one."""
    largest = torch.finfo(_FP8).max
    return (x.float() / scale).clamp(-largest, largest).to(_FP8)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves of x: [T, H, D], in float32 (arXiv 2104.09864). cos, sin: [T, D / 2] float32."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def copy_blocks(storage: Storage, pairs: NDArray[np.int32]) -> None:
    """See KVCache.copy_blocks."""
    for source, target in pairs.tolist():
        for caches in storage:
            for cache in caches:
                cache[:, target] = cache[:, source]


def largest(storage: Storage) -> Tensor:
    """See KVCache.largest."""
    sides = zip(*storage, strict=True)
    return torch.stack([torch.stack([t.float().abs().amax((1, 2, 3)) for t in side]) for side in sides])


def plan(batch: AttentionBatch, block_size: int) -> AttentionPlan:
    """See KVCache.plan."""
    return plan_calls(batch, block_size)


def attend(
    storage: Storage, layer: int, qkv: Tensor, plan: AttentionPlan, scale: float, num_heads: int
) -> Tensor:
    """See KVCache.attend."""
    keys, values = storage[layer]
    q: Tensor = qkv[:, : num_heads * keys.shape[-1]].unflatten(1, (num_heads, -1))  # [T, H, D]
    if storage.scales is None:
        q = q.to(keys.dtype)
    else:
        q = q.float() * _spread(storage.scales.keys[layer], num_heads)
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
    if storage.scales is not None:
        out *= _spread(storage.scales.values[layer], num_heads)
    return out.view(len(qkv), q.shape[1] * q.shape[2]).to(qkv.dtype)


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
