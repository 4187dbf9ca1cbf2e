"""The plain-torch oracle of each operation of contract.py: the mathematics, one row at a time, in float32."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernels.contract import AttentionBatch, HeadNorms, RopeTables
from gristmill.kernels.linear import Finish
from gristmill.kernels.quantized import Weight


def weight_values(weight: Weight) -> Tensor:
    """W: [out_features, in_features] float64. Of codes, code * scale + offset one column after the other."""
    if isinstance(weight, Tensor):
        return weight.double()
    values = torch.empty(weight.shape, dtype=torch.float64)
    for j in range(weight.shape[1]):
        if weight.kind == "int4":
            code = (weight.codes[:, j // 2] >> 4 * (j % 2) & 15).double() - (
                8 if weight.offsets is None else 0
            )
        else:
            code = weight.codes[:, j].double()
        group = j // weight.group_size
        value = code * weight.scales[group]
        value = value if weight.offsets is None else value + weight.offsets[group]
        values[:, j if weight.columns is None else int(weight.columns[j])] = value
    return values


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    finish: Finish = "plain",
    other: Tensor | None = None,
) -> Tensor:
    """f(x W^T + b), summed in float64. x: [n, in_features]; other: [n, out_features]; result: float64."""
    y = x.double() @ weight_values(weight).T + (0.0 if bias is None else bias.double())
    if finish == "silu":
        return y * torch.sigmoid(y)
    if other is None:
        return y
    return y * other if finish == "mul" else y + other


def gated_linear(
    x: Tensor, gate: Weight, up: Weight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """silu(x G^T + b) * (x U^T + c), as linear."""
    return linear(x, up, up_bias, "mul", linear(x, gate, gate_bias, "silu"))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X / sqrt(mean(x^2) + eps) * weight. x: [..., size]."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def argmax(logits: Tensor) -> Tensor:
    """The first place of each row's largest value, or of its first NaN: [num_rows] int64."""
    return torch.from_numpy(logits.float().numpy().argmax(1))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[a, b] -> [a cos - b sin, b cos + a sin] on each head's halves (arXiv 2104.09864).

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim / 2].
    """
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def turn_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor,
    rope_tables: RopeTables,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of KVCache.append, normalized and rotated: [num_tokens, heads, head_dim] each."""
    head_dim = 2 * rope_tables.cos.shape[1]
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    cos, sin = (table[positions][:, None] for table in rope_tables)
    return rope(q, cos, sin), rope(k, cos, sin), v


def round_kv(x: Tensor, scale: Tensor) -> Tensor:
    """What an FP8 cache makes of keys or values. x: [num_tokens, num_kv_heads, head_dim]; scale: [num_kv_heads]."""
    return to_fp8(x, scale[:, None]).float() * scale[:, None]


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """The codes nearest to x / scale, at most 448 in size; a NaN stays one."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (x.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sliding_window: int | None = None
) -> Tensor:
    """softmax(q k^T * scale) v of one sequence; the queries are its last tokens.

    q: [num_queries, num_heads, head_dim]; k, v: [seq_len, num_kv_heads, head_dim].
    """
    num_queries, num_heads, _ = q.shape
    group = num_heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    position = torch.arange(len(k) - num_queries, len(k))[:, None]
    key = torch.arange(len(k))
    hidden = key > position
    if sliding_window is not None:
        hidden |= key <= position - sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, block_size: int
) -> Tensor:
    """causal_attention of each sequence of a step over its blocks, scaled by 1 / sqrt(head_dim).

    q: [num_tokens, num_heads, head_dim]; keys, values: [num_blocks * block_size, num_kv_heads, head_dim].
    """
    out = torch.empty_like(q)
    starts: NDArray[np.int64] = batch.query_start_loc
    for i, length in enumerate(batch.seq_lens.tolist()):
        token = np.arange(length)
        slots = torch.from_numpy(
            batch.block_tables[i, token // block_size].astype(np.int64) * block_size + token % block_size
        )
        rows = slice(int(starts[i]), int(starts[i + 1]))
        out[rows] = causal_attention(
            q[rows], keys[slots], values[slots], q.shape[2] ** -0.5, batch.sliding_window
        )
    return out
