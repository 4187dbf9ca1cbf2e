"""The contract of every tensor operation, and its dispatch by device.

The engine calls these and nothing below them. It names KV blocks by id only: how a block is laid out inside belongs
to the backend, so C++ and Triton kernels can bring a layout of their own. `reference.py` is the oracle of each one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kernels import attention_cpu


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Neighbouring sequences of a step whose first `num_blocks` KV blocks are the same blocks."""

    first_sequence: int
    num_sequences: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The geometry of one step's attention.

    Sequence i owns query rows query_start_loc[i]:query_start_loc[i + 1]; they are the last of its seq_lens[i] tokens.
    query_start_loc: [n + 1] int64; seq_lens: [n] int64; block_tables: [n, max_blocks] int32, padded with any id.
    """

    query_start_loc: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    groups: tuple[PrefixGroup, ...] = ()
    sliding_window: int | None = None


class KVCache:
    """Keys and values of all layers in blocks. Opaque: only the backend that made the storage reads it."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = device
        self.storage = _backend(device).allocate_kv(
            num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype
        )

    def write(self, layer: int, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Stores k, v: [num_tokens, num_kv_heads, head_dim].

        slot_mapping: [num_tokens] int64, block * block_size + offset.
        """
        _backend(self.device).write_kv(self.storage, layer, k, v, slot_mapping)

    def plan(self, batch: AttentionBatch) -> Any:
        """What a backend works out once a step and uses in every layer."""
        return _backend(self.device).plan_attention(batch, self.block_size)

    def attend(self, layer: int, q: Tensor, plan: Any, scale: float) -> Tensor:
        """Causal attention of q: [num_tokens, num_heads, head_dim] over the cached keys, same shape out.

        Rows of q beyond the planned tokens are padding; their output is zero.
        """
        out: Tensor = _backend(self.device).attend(self.storage, layer, q, plan, scale)
        return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x: [..., size]."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, rotate-half order (arXiv 2104.09864).

    x: [num_tokens, num_heads, head_dim]; cos, sin: [num_tokens, 1, head_dim], sin negated in its first half.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _backend(device: torch.device) -> Any:
    if device.type == "cpu":
        return attention_cpu
    raise ValueError(f"no kernels for device {device.type!r}; this build runs on: cpu")
