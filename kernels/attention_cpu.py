"""Paged attention on the CPU with torch's own flash kernel, where the C++ kernels can't be: few large calls.

A step is cut once (`plan`) into: one call per shared-prefix group (read once for all rows of the group: cascade), one
per bucket of decode rows of like length, one per bucket of prefill rows of like length, merged by log-sum-exp. Keys lie
head-major, [kv_heads, num_blocks, block_size, head_dim]: a row's gathered blocks are one contiguous stream per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels.zeros import zeros_on_use

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch, HeadNorms, RopeTables

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
MAX_BUCKET_ROWS = 64  # decode rows in a call: more would pad short rows up to long ones
MAX_MASK_ELEMENTS = 1 << 22  # of a prefill bucket's mask
Storage = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Query rows `rows` (a slice of the step) against the whole of some blocks."""

    rows: slice
    blocks: Tensor  # [num_blocks] int64


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one query each. rows: [n]; blocks: [n * max_blocks]; mask: [n, 1, 1, max_blocks * block_size]."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Rows of several queries, padded to one length. gather: [n * max_queries]; scatter: [num_tokens], the step's rows;
    valid: [num_tokens], their places in the padded layout; mask None: causal and without earlier tokens."""

    num_sequences: int
    gather: Tensor
    valid: Tensor
    scatter: Tensor
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The calls of one step, the same in every layer."""

    num_tokens: int
    prefixes: tuple[_Prefix, ...]
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]


def allocate_kv(
    num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Storage:
    """Storage for keys and values. Zeroed: a block that is only padding is read, and must hold finite numbers."""
    shape = (num_kv_heads, num_blocks, block_size, head_dim)
    return [(zeros_on_use(shape, dtype), zeros_on_use(shape, dtype)) for _ in range(num_layers)]


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
    for cache, new in ((keys, k), (values, v)):
        cache.view(len(cache), -1, head_dim).index_copy_(1, slot_mapping, new.transpose(0, 1).to(cache.dtype))


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


def plan(batch: AttentionBatch, block_size: int) -> AttentionPlan:
    """Cuts the step into calls. Sequences of prefix groups attend to their own part from the last prefix's end on.

    With a sliding window there are no groups: what a row sees of a prefix is its own.
    """
    starts, lens = batch.query_start_loc, batch.seq_lens
    num_queries = np.diff(starts)
    first_blocks = np.zeros(len(lens), dtype=np.int64)
    prefixes = []
    for g in batch.groups if batch.sliding_window is None else ():
        end = g.first_sequence + g.num_sequences
        end_block = g.first_block + g.num_blocks
        first_blocks[g.first_sequence : end] = np.maximum(first_blocks[g.first_sequence : end], end_block)
        blocks = batch.block_tables[g.first_sequence, g.first_block : end_block].astype(np.int64)
        rows = slice(int(starts[g.first_sequence]), int(starts[end]))
        prefixes.append(_Prefix(rows, torch.from_numpy(blocks)))
    own_lens = lens - first_blocks * block_size
    decode = np.flatnonzero(num_queries == 1)
    decode = decode[np.argsort(-own_lens[decode], kind="stable")]
    prefill = np.flatnonzero(num_queries > 1)
    prefill = prefill[np.lexsort((-own_lens[prefill], -num_queries[prefill]))]
    return AttentionPlan(
        int(starts[-1]),
        tuple(prefixes),
        tuple(_plan_decode(b, batch, first_blocks, own_lens, block_size) for b in _decode_buckets(decode)),
        tuple(
            _plan_prefill(b, batch, first_blocks, own_lens, block_size)
            for b in _prefill_buckets(prefill, num_queries, own_lens)
        ),
    )


def attend(
    storage: Storage, layer: int, qkv: Tensor, plan: AttentionPlan, scale: float, num_heads: int
) -> Tensor:
    """See KVCache.attend."""
    keys, values = storage[layer]
    q: Tensor = qkv[:, : num_heads * keys.shape[-1]].unflatten(1, (num_heads, -1)).to(keys.dtype)  # [T, H, D]
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
    return out.view(len(qkv), q.shape[1] * q.shape[2]).to(qkv.dtype)


def _run_decode(
    keys: Tensor, values: Tensor, q: Tensor, d: _Decode, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    num_rows, kv_heads = len(d.rows), keys.shape[0]
    k, v = _gather(keys, d.blocks, num_rows), _gather(values, d.blocks, num_rows)
    grouped = q.index_select(0, d.rows).view(num_rows, kv_heads, -1, q.shape[-1])  # [n, KVH, G, D]
    o, l_own = _FLASH(grouped, k, v, attn_mask=d.mask.to(q.dtype), scale=scale)
    out.index_copy_(0, d.rows, o.reshape(num_rows, *q.shape[1:]))
    if lse is not None:
        lse.index_copy_(0, d.rows, l_own.reshape(num_rows, -1))


def _run_prefill(
    keys: Tensor, values: Tensor, q: Tensor, p: _Prefill, scale: float, out: Tensor, lse: Tensor | None
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
    keys: Tensor, values: Tensor, q: Tensor, p: _Prefix, scale: float, out: Tensor, lse: Tensor
) -> None:
    """Adds the prefix's share: softmax over both parts is their mean weighted by exp(lse). Updates lse."""
    rows = q[p.rows].transpose(0, 1).unsqueeze(0)  # [1, H, T, D]
    o, l_prefix = _FLASH(rows, _gather(keys, p.blocks, 1), _gather(values, p.blocks, 1), scale=scale)
    l_prefix = l_prefix[0].transpose(0, 1)  # [T, H]
    weight = torch.sigmoid(l_prefix - lse[p.rows]).unsqueeze(-1).to(q.dtype)  # [T, H, 1]
    out[p.rows] = torch.lerp(out[p.rows], o[0].transpose(0, 1), weight)
    lse[p.rows] = torch.logaddexp(l_prefix, lse[p.rows])


def _gather(cache: Tensor, blocks: Tensor, num_rows: int) -> Tensor:
    """[num_rows, kv_heads, tokens, head_dim] of the rows' blocks, row after row in `blocks`."""
    kv_heads, _, _, head_dim = cache.shape
    return cache.index_select(1, blocks).view(kv_heads, num_rows, -1, head_dim).transpose(0, 1)


def _decode_buckets(sequences: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [sequences[i : i + MAX_BUCKET_ROWS] for i in range(0, len(sequences), MAX_BUCKET_ROWS)]


def _prefill_buckets(
    sequences: NDArray[np.int64], num_queries: NDArray[np.int64], own_lens: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Neighbours in descending number of queries, until padding would pass a third or the mask its limit."""
    buckets, start = [], 0
    while start < len(sequences):
        longest = int(num_queries[sequences[start]])
        alike = num_queries[sequences[start:]] >= longest * 2 // 3
        count = int(np.argmin(alike)) if not alike.all() else len(alike)
        widest = np.maximum.accumulate(own_lens[sequences[start : start + count]])
        fits = np.arange(1, count + 1) * longest * widest <= MAX_MASK_ELEMENTS
        count = max(1, int(fits.sum()))
        buckets.append(sequences[start : start + count])
        start += count
    return buckets


def _own_blocks(
    sequences: NDArray[np.int64], batch: AttentionBatch, first_blocks: NDArray[np.int64], num_blocks: int
) -> Tensor:
    """Block ids of each row's own part, padded to num_blocks with its last columns or block 0."""
    columns = first_blocks[sequences, None] + np.arange(num_blocks)
    columns = np.minimum(columns, batch.block_tables.shape[1] - 1)
    return torch.from_numpy(batch.block_tables[sequences[:, None], columns].astype(np.int64).ravel())


def _plan_decode(
    sequences: NDArray[np.int64],
    batch: AttentionBatch,
    first_blocks: NDArray[np.int64],
    own_lens: NDArray[np.int64],
    block_size: int,
) -> _Decode:
    num_blocks = int(-(-own_lens[sequences].max() // block_size))
    key = np.arange(num_blocks * block_size)
    hidden = key >= own_lens[sequences, None]
    if batch.sliding_window is not None:
        hidden |= key <= own_lens[sequences, None] - 1 - batch.sliding_window
    return _Decode(
        torch.from_numpy(batch.query_start_loc[sequences]),
        _own_blocks(sequences, batch, first_blocks, num_blocks),
        _mask(hidden[:, None, None, :]),
    )


def _plan_prefill(
    sequences: NDArray[np.int64],
    batch: AttentionBatch,
    first_blocks: NDArray[np.int64],
    own_lens: NDArray[np.int64],
    block_size: int,
) -> _Prefill:
    starts = batch.query_start_loc[sequences]
    counts = batch.query_start_loc[sequences + 1] - starts
    own = own_lens[sequences]
    longest = int(counts.max())
    query = np.arange(longest)
    present = query < counts[:, None]  # [n, Lq]
    num_blocks = int(-(-own.max() // block_size))
    mask = None
    if (own != counts).any() or batch.sliding_window is not None:
        key = np.arange(num_blocks * block_size)
        position = (own - counts)[:, None] + np.minimum(query, counts[:, None] - 1)  # [n, Lq]
        hidden = key > position[:, :, None]
        if batch.sliding_window is not None:
            hidden |= key <= position[:, :, None] - batch.sliding_window
        mask = _mask(hidden[:, None])
    else:
        num_blocks = max(num_blocks, -(-longest // block_size))
    rows = starts[:, None] + np.where(present, query, 0)
    return _Prefill(
        len(sequences),
        torch.from_numpy(rows.ravel()),
        torch.from_numpy(np.flatnonzero(present)),
        torch.from_numpy(rows[present]),
        _own_blocks(sequences, batch, first_blocks, num_blocks),
        mask,
    )


def _mask(hidden: NDArray[np.bool_]) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))
