"""The plain-torch oracle of each operation of contract.py: the mathematics, one row at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x: [..., size]."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[a, b] -> [a cos - b sin, b cos + a sin] on each head's halves. cos, sin: [num_tokens, 1, head_dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


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
