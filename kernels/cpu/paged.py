"""Paged attention on the CPU by the C++ kernels of kernels/cpu: storage and calls.

Unlike torch/attention.py, which gathers blocks for torch's kernel, these read keys and values where they lie. The
layout of a block and the kernel's way of work are described in src/attention.h and attention.cpp, what a step is cut
into in paged_plan.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernels.contract import AttentionBatch, Backend, HeadNorms, KVCache, KVSpec, RopeTables
from gristmill.kernels.cpu.paged_plan import BLOCK_SIZE, decodes_on, grow_arrays, plan_arrays
from gristmill.kernels.torch.memory import zeros_on_use

MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16)  # of activations
# KvType of kernels/cpu/src/attention.h
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}
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


class PagedKVCache(KVCache):
    """keys, values: [num_blocks, num_layers, num_kv_heads, block_size * head_dim].

    The arguments of both kernels that depend on the cache alone are filled in once; a call changes the others. Raises
    ValueError for a size or type that the kernels can't do.
    """

    def __init__(self, backend: Backend, library: ctypes.CDLL, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(backend, spec, num_blocks)
        _check(spec)
        self._functions = _bind(library)
        shape = (num_blocks, spec.num_layers, spec.num_kv_heads, BLOCK_SIZE * spec.head_dim)
        self.keys, self.values = zeros_on_use(shape, spec.dtype), zeros_on_use(shape, spec.dtype)
        self._scales = [] if spec.scales is None else [part.float().contiguous() for part in spec.scales]
        sides = [self.keys[0], self.values[0], *self._scales]
        self._addresses = [[side[layer].data_ptr() for side in sides] for layer in range(spec.num_layers)]
        self.layer_bytes = self.keys.stride(1) * self.keys.element_size()
        self._append_args = AppendArgs()
        self._fill(self._append_args)
        self._last: PagedPlan | None = None

    def append(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """See KVCache. qkv: float32 or bfloat16, contiguous."""
        # Kept until the call returns: it reads their memory.
        weights = None if norms is None else [w.float().contiguous() for w in (norms.q, norms.k)]
        args = self.fill_append(layer, qkv, rope, positions, slot_mapping)
        args.q_norm, args.k_norm = [w.data_ptr() for w in weights] if weights else (None, None)
        args.eps = 0.0 if norms is None else norms.eps
        self._functions.append(ctypes.byref(args))

    def plan(self, batch: AttentionBatch) -> PagedPlan:
        """Cuts a step into tiles of rows and lists what each tile sees."""
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

    def attend(self, layer: int, qkv: Tensor, plan: PagedPlan, scale: float) -> Tensor:
        """See KVCache. qkv: float32 or bfloat16, contiguous."""
        out = qkv.new_empty(len(qkv), self.spec.num_heads * self.spec.head_dim)
        if len(qkv) > plan.num_tokens:
            out[plan.num_tokens :] = 0
        self._functions.attend(ctypes.byref(self.fill_attend(layer, qkv, out, plan, scale)))
        return out

    def largest(self) -> Tensor:
        """See KVCache."""
        return torch.stack([side.float().abs().amax((0, 3)) for side in (self.keys, self.values)])

    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """See KVCache."""
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        for side in (self.keys, self.values):
            size = side.stride(0) * side.element_size()
            self._functions.copy_blocks(side.data_ptr(), pairs.ctypes.data, len(pairs), size)

    def fill_append(
        self, layer: int, qkv: Tensor, rope: RopeTables, positions: Tensor, slot_mapping: Tensor
    ) -> AppendArgs:
        """The cache's own arguments, filled in for `append` of this; head norms are left to the caller."""
        assert qkv.is_contiguous() and positions.is_contiguous() and slot_mapping.is_contiguous()
        assert positions.dtype == slot_mapping.dtype == torch.int64
        assert rope.cos.dtype == rope.sin.dtype == torch.float32
        assert rope.cos.is_contiguous() and rope.sin.is_contiguous()
        assert len(slot_mapping) <= min(len(qkv), len(positions))
        args = self._append_args
        self._set_layer(args, layer)
        args.qkv = qkv.data_ptr()
        args.cos, args.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        args.positions, args.slots = positions.data_ptr(), slot_mapping.data_ptr()
        args.num_tokens, args.qkv_is_bf16 = len(slot_mapping), qkv.dtype == torch.bfloat16
        return args

    def fill_attend(self, layer: int, qkv: Tensor, out: Tensor, plan: PagedPlan, scale: float) -> AttendArgs:
        """The plan's own arguments, filled in for `attend` of this. out: [padded_tokens, num_heads * head_dim]."""
        assert qkv.is_contiguous() and qkv.dtype in _DTYPES and len(qkv) >= plan.num_tokens
        args = plan.args
        self._fill(args)
        self._set_layer(args, layer)
        args.qkv, args.out = qkv.data_ptr(), out.data_ptr()
        args.qkv_stride, args.qkv_is_bf16, args.scale = qkv.shape[1], qkv.dtype == torch.bfloat16, scale
        return args

    def _fill(self, args: AppendArgs | AttendArgs) -> None:
        """Writes what depends on the cache alone into the arguments."""
        args.block_stride, args.kv_type = self.keys.stride(0), _KV_TYPES[self.spec.dtype]
        args.num_heads, args.num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        args.head_dim = self.spec.head_dim

    def _set_layer(self, args: AppendArgs | AttendArgs, layer: int) -> None:
        """Writes where the layer's keys, values and scales lie into the arguments."""
        args.keys, args.values, *scales = self._addresses[layer]
        if scales:
            args.key_scales, args.value_scales = scales


class _Functions(NamedTuple):
    attend: Any
    append: Any
    copy_blocks: Any


def _bind(library: ctypes.CDLL) -> _Functions:
    functions = _Functions(library.gristmill_attend, library.gristmill_append, library.gristmill_copy_blocks)
    functions.attend.argtypes = [ctypes.POINTER(AttendArgs)]
    functions.append.argtypes = [ctypes.POINTER(AppendArgs)]
    functions.copy_blocks.argtypes = [_P, _P, _I, _I]
    for function in functions:
        function.restype = None
    return functions


def _check(spec: KVSpec) -> None:
    if spec.block_size != BLOCK_SIZE:
        raise ValueError(f"block_size is {spec.block_size}; the CPU's kernels take {BLOCK_SIZE}")
    if not supports(spec.head_dim):
        raise ValueError(
            f"head_dim is {spec.head_dim}; the CPU's kernels take multiples of 16 up to {MAX_HEAD_DIM}"
        )
    if spec.dtype not in _KV_TYPES:
        raise ValueError(
            f"the KV cache's type is {spec.dtype}; the CPU's kernels take {', '.join(map(str, _KV_TYPES))}"
        )
    expected = (spec.num_layers, spec.num_kv_heads)
    if spec.scales is not None and any(part.shape != expected for part in spec.scales):
        shapes = " and ".join(str(list(part.shape)) for part in spec.scales)
        raise ValueError(f"the KV scales are {shapes}; the cache needs {list(expected)} of each")
