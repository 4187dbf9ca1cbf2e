"""Paged attention on the CPU by the C++ kernels of kernels/cpu: storage and calls.

Unlike attention.py, which gathers blocks for torch's kernel, these read keys and values where they lie. The layout
of a block and the kernel's way of work are described in src/attention.h and attention.cpp, what a step is cut
into in paged_plan.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernels.cpu.library import CpuKernels
from gristmill.kernels.cpu.paged_plan import BLOCK_SIZE, decodes_on, grow_arrays, plan_arrays
from gristmill.kernels.zeros import zeros_on_use

if TYPE_CHECKING:
    from gristmill.kernels.ops import AttentionBatch, HeadNorms, KVScales, RopeTables

MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16)  # of activations
_KV_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float8_e4m3fn: 2,
}  # KvType of kernels/cpu/src/attention.h
_P, _I = ctypes.c_void_p, ctypes.c_int64


class AttendArgs(ctypes.Structure):
    """AttendArgs of kernels/cpu/src/attention.h."""

    _fields_ = [
        *((name, _P) for name in ("qkv", "out", "keys", "values", "block_tables", "positions")),
        *((name, _P) for name in ("tile_starts", "tile_order", "segment_starts", "segments")),
        *((name, _P) for name in ("key_scales", "value_scales")),
        *((name, _I) for name in ("num_tiles", "table_stride", "qkv_stride", "block_stride", "num_heads")),
        *((name, _I) for name in ("num_kv_heads", "head_dim", "window", "qkv_is_bf16", "kv_type")),
        ("scale", ctypes.c_float),
    ]


class AppendArgs(ctypes.Structure):
    """AppendArgs of kernels/cpu/src/attention.h."""

    _fields_ = [
        *((name, _P) for name in ("qkv", "keys", "values", "cos", "sin", "positions", "slots")),
        *((name, _P) for name in ("q_norm", "k_norm", "key_scales", "value_scales")),
        *((name, _I) for name in ("num_tokens", "block_stride", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _I) for name in ("qkv_is_bf16", "kv_type")),
        ("eps", ctypes.c_float),
    ]


class PagedStorage:
    """Keys and values of all layers: [num_blocks, num_layers, num_kv_heads, block_size * head_dim] each.

    The arguments of both kernels that depend on the storage are filled in once; a call changes the others.
    """

    def __init__(self, keys: Tensor, values: Tensor, head_dim: int, scales: KVScales | None) -> None:
        self.keys, self.values, self.head_dim = keys, values, head_dim
        self._scales = [] if scales is None else [part.float().contiguous() for part in scales]
        self._addresses = [
            [
                part.data_ptr()
                for part in (keys[0, layer], values[0, layer], *(s[layer] for s in self._scales))
            ]
            for layer in range(keys.shape[1])
        ]
        self.layer_bytes = keys.stride(1) * keys.element_size()
        self.append_args = AppendArgs()
        self.fill(self.append_args)

    def fill(self, args: AppendArgs | AttendArgs) -> None:
        """Writes what depends on the storage alone into the arguments."""
        args.block_stride = self.keys.stride(0)
        args.num_kv_heads, args.head_dim = self.keys.shape[2], self.head_dim
        args.kv_type = _KV_TYPES[self.keys.dtype]

    def set_layer(self, args: AppendArgs | AttendArgs, layer: int) -> None:
        """Writes where the layer's keys, values and scales lie into the arguments."""
        args.keys, args.values, *scales = self._addresses[layer]
        if scales:
            args.key_scales, args.value_scales = scales


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's tiles of rows and the segments each sees; `arrays` owns what the addresses in `args` point to."""

    batch: AttentionBatch
    num_tokens: int
    args: AttendArgs
    arrays: dict[str, NDArray[Any]]


def supports(head_dim: int) -> bool:
    """Whether the kernels can do heads of this size."""
    return head_dim % 16 == 0 and 0 < head_dim <= MAX_HEAD_DIM


class PagedCpu:
    """The backend of ops.KVCache for CPUs with C++ kernels; its methods are described there."""

    def __init__(self, kernels: CpuKernels) -> None:
        assert kernels.library is not None
        self._attend = kernels.library.gristmill_attend
        self._append = kernels.library.gristmill_append
        self._copy_blocks = kernels.library.gristmill_copy_blocks
        self._attend.argtypes = [ctypes.POINTER(AttendArgs)]
        self._append.argtypes = [ctypes.POINTER(AppendArgs)]
        self._copy_blocks.argtypes = [_P, _P, _I, _I]
        for function in (self._attend, self._append, self._copy_blocks):
            function.restype = None
        self._last: PagedPlan | None = None

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        scales: KVScales | None = None,
    ) -> PagedStorage:
        """Zeroed storage. Raises ValueError for a size or type that the kernels can't do."""
        if block_size != BLOCK_SIZE:
            raise ValueError(f"block_size is {block_size}; the CPU's kernels take {BLOCK_SIZE}")
        if not supports(head_dim):
            raise ValueError(
                f"head_dim is {head_dim}; the CPU's kernels take multiples of 16 up to {MAX_HEAD_DIM}"
            )
        if dtype not in _KV_TYPES:
            raise ValueError(
                f"the KV cache's type is {dtype}; the CPU's kernels take {', '.join(map(str, _KV_TYPES))}"
            )
        if scales is not None and any(part.shape != (num_layers, num_kv_heads) for part in scales):
            shapes = " and ".join(str(list(part.shape)) for part in scales)
            raise ValueError(
                f"the KV scales are {shapes}; the cache needs [{num_layers}, {num_kv_heads}] of each"
            )
        shape = (num_blocks, num_layers, num_kv_heads, BLOCK_SIZE * head_dim)
        return PagedStorage(zeros_on_use(shape, dtype), zeros_on_use(shape, dtype), head_dim, scales)

    def append(
        self,
        storage: PagedStorage,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> None:
        """See KVCache.append. qkv: float32 or bfloat16, contiguous."""
        # Kept until the call returns: it reads their memory.
        weights = None if norms is None else [w.float().contiguous() for w in (norms.q, norms.k)]
        args = fill_append(storage, layer, qkv, rope, positions, slot_mapping, num_heads)
        args.q_norm, args.k_norm = [w.data_ptr() for w in weights] if weights else (None, None)
        args.eps = 0.0 if norms is None else norms.eps
        self._append(ctypes.byref(args))

    def plan(self, batch: AttentionBatch, block_size: int) -> PagedPlan:
        """Cuts a step into tiles of rows and lists what each tile sees."""
        assert block_size == BLOCK_SIZE
        last = self._last
        if last is not None and decodes_on(batch, last.batch):
            arrays = grow_arrays(last.arrays, batch)
        else:
            arrays = plan_arrays(batch, torch.get_num_threads())
        args = AttendArgs(**{name: array.ctypes.data for name, array in arrays.items()})
        args.num_tiles, args.table_stride = len(arrays["tile_order"]), arrays["block_tables"].shape[1]
        args.window = batch.sliding_window or 0
        self._last = PagedPlan(batch, int(batch.query_start_loc[-1]), args, arrays)
        return self._last

    def attend(
        self, storage: PagedStorage, layer: int, qkv: Tensor, plan: PagedPlan, scale: float, num_heads: int
    ) -> Tensor:
        """See KVCache.attend. qkv: float32 or bfloat16, contiguous."""
        out = qkv.new_empty(len(qkv), num_heads * storage.head_dim)
        if len(qkv) > plan.num_tokens:
            out[plan.num_tokens :] = 0
        self._attend(ctypes.byref(fill_attend(storage, layer, qkv, out, plan, scale, num_heads)))
        return out

    def largest(self, storage: PagedStorage) -> Tensor:
        """See KVCache.largest."""
        return torch.stack([side.float().abs().amax((0, 3)) for side in (storage.keys, storage.values)])

    def copy_blocks(self, storage: PagedStorage, pairs: NDArray[np.int32]) -> None:
        """See KVCache.copy_blocks."""
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        for t in (storage.keys, storage.values):
            self._copy_blocks(t.data_ptr(), pairs.ctypes.data, len(pairs), t.stride(0) * t.element_size())


def fill_append(
    storage: PagedStorage,
    layer: int,
    qkv: Tensor,
    rope: RopeTables,
    positions: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
) -> AppendArgs:
    """The storage's own arguments, filled in for KVCache.append of this; head norms are left to the caller."""
    assert qkv.is_contiguous() and positions.is_contiguous() and slot_mapping.is_contiguous()
    assert positions.dtype == slot_mapping.dtype == torch.int64
    assert rope.cos.dtype == rope.sin.dtype == torch.float32
    assert rope.cos.is_contiguous() and rope.sin.is_contiguous()
    assert len(slot_mapping) <= min(len(qkv), len(positions))
    args = storage.append_args
    storage.set_layer(args, layer)
    args.qkv = qkv.data_ptr()
    args.cos, args.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
    args.positions, args.slots = positions.data_ptr(), slot_mapping.data_ptr()
    args.num_tokens, args.num_heads, args.qkv_is_bf16 = len(slot_mapping), num_heads, _is_bf16(qkv)
    return args


def fill_attend(
    storage: PagedStorage, layer: int, qkv: Tensor, out: Tensor, plan: PagedPlan, scale: float, num_heads: int
) -> AttendArgs:
    """The plan's own arguments, filled in for KVCache.attend of this. out: [padded_tokens, num_heads * head_dim]."""
    assert qkv.is_contiguous() and qkv.dtype in _DTYPES and len(qkv) >= plan.num_tokens
    args = plan.args
    storage.fill(args)
    storage.set_layer(args, layer)
    args.qkv, args.out = qkv.data_ptr(), out.data_ptr()
    args.qkv_stride, args.num_heads = qkv.shape[1], num_heads
    args.qkv_is_bf16, args.scale = _is_bf16(qkv), scale
    return args


def _is_bf16(t: Tensor) -> int:
    return int(t.dtype == torch.bfloat16)
