"""The contract of every tensor operation, and its dispatch by device.

The engine calls these and nothing below them. It names KV blocks by id only: how a block is laid out inside belongs
to the backend, so C++ and Triton kernels can bring a layout of their own. `reference.py` is the oracle of each one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.cpu import paged as paged_cpu
from gristmill.kernels.cpu.library import NO_CPU_KERNELS, CpuKernels
from gristmill.kernels.cpu.pointwise import PointwiseKernels
from gristmill.kernels.torch import attention as attention_cpu


class RopeTables(NamedTuple):
    """cos and sin of every position's angles: [num_positions, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each head's queries and keys (Qwen3). q, k: [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


class KVScales(NamedTuple):
    """What an FP8 code is multiplied by. keys, values: [num_layers, num_kv_heads] float32, finite and above 0."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Neighbouring sequences of a step whose KV blocks first_block:first_block + num_blocks are the same blocks.

    Groups nest like a tree. The groups of one sequence follow each other from block 0 on, and all of its query rows
    come after them.
    """

    first_sequence: int
    num_sequences: int
    first_block: int
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
    """Keys and values of all layers in blocks. Opaque: only the backend that made the storage reads it.

    dtype: float32, bfloat16 or float8_e4m3fn. FP8 is storage only: x is kept as the code nearest to x / scale, at most
    448 in size, and read as code * scale in float32; a NaN stays one. scales: given for FP8 and for nothing else.
    kernels: the C++ kernels of this CPU; at level `none` the storage and the work are torch's.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: CpuKernels = NO_CPU_KERNELS,
        scales: KVScales | None = None,
    ) -> None:
        assert (scales is not None) == (dtype == torch.float8_e4m3fn)
        self.num_blocks, self.block_size = num_blocks, block_size
        self._like = partial(
            KVCache,
            num_layers=num_layers,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            kernels=kernels,
            scales=scales,
        )
        self._backend = _backend(device, kernels, head_dim)
        self.storage = self._backend.allocate_kv(
            num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, scales
        )

    def like(self, num_blocks: int) -> KVCache:
        """An empty cache of the same model, type and scales with another number of blocks."""
        return self._like(num_blocks=num_blocks)

    def append(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> None:
        """Normalizes (where the model does) and rotates queries and keys in place, then stores keys and values.

        qkv: [padded_tokens, (num_heads + 2 num_kv_heads) * head_dim]; positions: [padded_tokens] int64;
        slot_mapping: [num_tokens] int64, block * block_size + offset. Rows beyond num_tokens are padding.
        """
        self._backend.append(self.storage, layer, qkv, rope, positions, slot_mapping, num_heads, norms)

    def plan(self, batch: AttentionBatch) -> Any:
        """What a backend works out once a step and uses in every layer."""
        return self._backend.plan(batch, self.block_size)

    def attend(self, layer: int, qkv: Tensor, plan: Any, scale: float, num_heads: int) -> Tensor:
        """Causal attention of the queries in qkv (see append) over the cached keys.

        Returns [padded_tokens, num_heads * head_dim]; the rows of padding are zero.
        """
        out: Tensor = self._backend.attend(self.storage, layer, qkv, plan, scale, num_heads)
        return out

    def largest(self) -> Tensor:
        """The largest size of a key and of a value in it: [2, num_layers, num_kv_heads] float32; of FP8, of a code."""
        found: Tensor = self._backend.largest(self.storage)
        return found

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copies whole blocks in all layers, pair after pair. pairs: [n, 2] int32, (from, to)."""
        self._backend.copy_blocks(self.storage, pairs)


class Pointwise:
    """The row-wise operations around the linears, by the C++ kernels where there are some."""

    def __init__(self, kernels: CpuKernels = NO_CPU_KERNELS) -> None:
        self._compiled = None if kernels.library is None else PointwiseKernels(kernels.library)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight. x: [num_rows, size]; weight: [size]."""
        if self._compiled is None:
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        return self._compiled.rms_norm(x, weight, eps)

    def argmax(self, logits: Tensor) -> Tensor:
        """The index of each row's largest value, the lowest of equal ones. logits: [num_rows, size] -> int64."""
        return logits.argmax(-1) if self._compiled is None else self._compiled.argmax(logits)


def _backend(device: torch.device, kernels: CpuKernels, head_dim: int) -> Any:
    if device.type != "cpu":
        raise ValueError(f"no kernels for device {device.type!r}; this build runs on: cpu")
    if kernels.library is None or not paged_cpu.supports(head_dim):
        return attention_cpu
    return paged_cpu.PagedCpu(kernels)
