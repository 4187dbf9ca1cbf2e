"""Paged attention on the CPU by the C++ kernels of kernels/cpu: storage, what each step is cut into, and the calls.

Unlike attention_cpu.py, which gathers blocks for torch's kernel, these read keys and values where they lie. The layout
of a block and the kernel's way of work are described in kernels/cpu/attention.h and attention.cpp.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu_library import CpuKernels
from kernels.zeros import zeros_on_use

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch, HeadNorms, RopeTables

BLOCK_SIZE = 16
MAX_HEAD_DIM = 256
MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 32
NUM_ITEMS_PER_THREAD = 4  # work items that a step is cut into, at least: they cost unlike amounts
_SEGMENT = np.dtype(
    [(name, np.int32) for name in ("row_begin", "row_end", "sequence", "first_key", "num_keys")]
)
_DTYPES = (torch.float32, torch.bfloat16)
_P, _I = ctypes.c_void_p, ctypes.c_int64


class _AttendArgs(ctypes.Structure):
    """AttendArgs of kernels/cpu/attention.h."""

    _fields_ = [
        *((name, _P) for name in ("qkv", "out", "keys", "values", "block_tables", "positions")),
        *((name, _P) for name in ("tile_starts", "tile_order", "segment_starts", "segments")),
        *((name, _I) for name in ("num_tiles", "table_stride", "qkv_stride", "block_stride", "num_heads")),
        *((name, _I) for name in ("num_kv_heads", "head_dim", "window", "qkv_is_bf16", "kv_is_bf16")),
        ("scale", ctypes.c_float),
    ]


class _AppendArgs(ctypes.Structure):
    """AppendArgs of kernels/cpu/attention.h."""

    _fields_ = [
        *((name, _P) for name in ("qkv", "keys", "values", "cos", "sin", "positions", "slots")),
        *((name, _P) for name in ("q_norm", "k_norm")),
        *((name, _I) for name in ("num_tokens", "block_stride", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _I) for name in ("qkv_is_bf16", "kv_is_bf16")),
        ("eps", ctypes.c_float),
    ]


class PagedStorage:
    """Keys and values of all layers: [num_blocks, num_layers, num_kv_heads, block_size * head_dim] each.

    The arguments of both kernels that depend on the storage are filled in once; a call changes the others.
    """

    def __init__(self, keys: Tensor, values: Tensor, head_dim: int) -> None:
        self.keys, self.values, self.head_dim = keys, values, head_dim
        self.addresses = [
            (keys[0, layer].data_ptr(), values[0, layer].data_ptr()) for layer in range(keys.shape[1])
        ]
        self.append_args = _AppendArgs()
        self.fill(self.append_args)

    def fill(self, args: _AppendArgs | _AttendArgs) -> None:
        """Writes what depends on the storage alone into the arguments."""
        args.block_stride = self.keys.stride(0)
        args.num_kv_heads, args.head_dim = self.keys.shape[2], self.head_dim
        args.kv_is_bf16 = _is_bf16(self.keys)


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's tiles of rows and the segments each sees; `arrays` owns what the addresses in `args` point to."""

    num_tokens: int
    args: _AttendArgs
    arrays: tuple[NDArray[Any], ...]


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
        self._attend.argtypes = [ctypes.POINTER(_AttendArgs)]
        self._append.argtypes = [ctypes.POINTER(_AppendArgs)]
        self._copy_blocks.argtypes = [_P, _P, _I, _I]
        for function in (self._attend, self._append, self._copy_blocks):
            function.restype = None

    def allocate_kv(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> PagedStorage:
        """Zeroed storage. Raises ValueError for a size or type that the kernels can't do."""
        if block_size != BLOCK_SIZE:
            raise ValueError(f"block_size is {block_size}; the CPU's kernels take {BLOCK_SIZE}")
        if not supports(head_dim):
            raise ValueError(
                f"head_dim is {head_dim}; the CPU's kernels take multiples of 16 up to {MAX_HEAD_DIM}"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"the KV cache's type is {dtype}; the CPU's kernels take float32 and bfloat16")
        shape = (num_blocks, num_layers, num_kv_heads, BLOCK_SIZE * head_dim)
        return PagedStorage(zeros_on_use(shape, dtype), zeros_on_use(shape, dtype), head_dim)

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
        assert qkv.is_contiguous() and positions.is_contiguous() and slot_mapping.is_contiguous()
        assert positions.dtype == slot_mapping.dtype == torch.int64
        assert rope.cos.dtype == rope.sin.dtype == torch.float32
        assert rope.cos.is_contiguous() and rope.sin.is_contiguous()
        assert len(slot_mapping) <= min(len(qkv), len(positions))
        args = storage.append_args
        args.qkv, (args.keys, args.values) = qkv.data_ptr(), storage.addresses[layer]
        args.cos, args.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        args.positions, args.slots = positions.data_ptr(), slot_mapping.data_ptr()
        args.num_tokens, args.num_heads, args.qkv_is_bf16 = len(slot_mapping), num_heads, _is_bf16(qkv)
        # Kept until the call returns: it reads their memory.
        weights = None if norms is None else [w.float().contiguous() for w in (norms.q, norms.k)]
        args.q_norm, args.k_norm = [w.data_ptr() for w in weights] if weights else (None, None)
        args.eps = 0.0 if norms is None else norms.eps
        self._append(ctypes.byref(args))

    def plan(self, batch: AttentionBatch, block_size: int) -> PagedPlan:
        """Cuts a step into tiles of rows and lists what each tile sees."""
        assert block_size == BLOCK_SIZE
        num_tokens = int(batch.query_start_loc[-1])
        positions = _plan_positions(batch)
        tile_starts = _plan_tiles(batch.query_start_loc, torch.get_num_threads())
        segments, segment_starts, costs = _plan_segments(batch, positions, tile_starts)
        tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
        arrays: dict[str, NDArray[Any]] = {
            "block_tables": tables,
            "positions": positions.astype(np.int32),
            "tile_starts": tile_starts.astype(np.int32),
            "tile_order": np.argsort(-costs, kind="stable").astype(np.int32),
            "segment_starts": segment_starts,
            "segments": segments,
        }
        args = _AttendArgs(**{name: array.ctypes.data for name, array in arrays.items()})
        args.num_tiles, args.table_stride = len(costs), tables.shape[1]
        args.window = batch.sliding_window or 0
        return PagedPlan(num_tokens, args, tuple(arrays.values()))

    def attend(
        self, storage: PagedStorage, layer: int, qkv: Tensor, plan: PagedPlan, scale: float, num_heads: int
    ) -> Tensor:
        """See KVCache.attend. qkv: float32 or bfloat16, contiguous."""
        assert qkv.is_contiguous() and qkv.dtype in _DTYPES and len(qkv) >= plan.num_tokens
        out = qkv.new_empty(len(qkv), num_heads * storage.head_dim)
        if len(qkv) > plan.num_tokens:
            out[plan.num_tokens :] = 0
        args = plan.args
        storage.fill(args)
        args.qkv, args.out, (args.keys, args.values) = (
            qkv.data_ptr(),
            out.data_ptr(),
            storage.addresses[layer],
        )
        args.qkv_stride, args.num_heads = qkv.shape[1], num_heads
        args.qkv_is_bf16, args.scale = _is_bf16(qkv), scale
        self._attend(ctypes.byref(args))
        return out

    def copy_blocks(self, storage: PagedStorage, pairs: NDArray[np.int32]) -> None:
        """See KVCache.copy_blocks."""
        pairs = np.ascontiguousarray(pairs, dtype=np.int32)
        for t in (storage.keys, storage.values):
            self._copy_blocks(t.data_ptr(), pairs.ctypes.data, len(pairs), t.stride(0) * t.element_size())


def _is_bf16(t: Tensor) -> int:
    return int(t.dtype == torch.bfloat16)


def _plan_positions(batch: AttentionBatch) -> NDArray[np.int64]:
    """Each row's place in its sequence: the rows of a sequence are its last tokens."""
    starts = batch.query_start_loc
    return np.arange(starts[-1]) + np.repeat(batch.seq_lens - starts[1:], np.diff(starts))


def _plan_tiles(starts: NDArray[np.int64], num_threads: int) -> NDArray[np.int64]:
    """The first rows of the tiles, and the end. A sequence of many rows is cut evenly, short ones share a tile."""
    num_rows, counts = int(starts[-1]), np.diff(starts)
    wanted = -(-num_rows // (NUM_ITEMS_PER_THREAD * num_threads))
    tile_rows = min(max(wanted, MIN_TILE_ROWS), MAX_TILE_ROWS)
    is_long = counts > tile_rows // 2
    pieces = np.where(is_long, -(-counts // tile_rows), 1)
    sequence = np.repeat(np.arange(len(counts)), pieces)
    piece = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first_rows = starts[sequence] + piece * counts[sequence] // pieces[sequence]
    # Short sequences begin a tile where the rows since the last long one pass a multiple of tile_rows.
    run_starts = np.maximum.accumulate(np.where(is_long, starts[1:], 0))
    place = (starts[:-1] - run_starts) // tile_rows
    begins = is_long.copy()
    begins[:1] = True
    begins[1:] |= is_long[:-1] | (place[1:] != place[:-1])
    return np.append(first_rows[(piece > 0) | begins[sequence]], num_rows)


def _plan_segments(
    batch: AttentionBatch, positions: NDArray[np.int64], tile_starts: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.float64]]:
    """The segments of each tile in turn, where each tile's begin, and about what each tile costs."""
    segments = _list_segments(batch)
    num_tiles = len(tile_starts) - 1
    # Every segment's rows overlap a range of tiles.
    first = np.searchsorted(tile_starts, segments["row_begin"], side="right") - 1
    counts = np.searchsorted(tile_starts, segments["row_end"], side="left") - first
    tile = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    order = np.argsort(tile, kind="stable")
    tile, spread = tile[order], np.repeat(segments, counts)[order]
    end = np.minimum(spread["row_end"], tile_starts[tile + 1])
    num_rows = end - np.maximum(spread["row_begin"], tile_starts[tile])
    num_keys = np.minimum(spread["num_keys"], positions[end - 1] + 1 - spread["first_key"])
    # Reading keys and values costs about as much as 4 rows' work with them.
    costs = np.bincount(tile, (num_rows + 4.0) * num_keys, num_tiles).astype(np.float64)
    segment_starts = np.searchsorted(tile, np.arange(num_tiles + 1))
    return spread, segment_starts.astype(np.int32), costs


def _list_segments(batch: AttentionBatch) -> NDArray[Any]:
    """Groups, then what each sequence has behind its groups."""
    starts, num_sequences = batch.query_start_loc, len(batch.seq_lens)
    fields = [(g.first_sequence, g.num_sequences, g.first_block, g.num_blocks) for g in batch.groups]
    first, count, first_block, num_blocks = np.array(fields, dtype=np.int64).reshape(-1, 4).T
    change = np.zeros(num_sequences + 1, dtype=np.int64)
    np.add.at(change, first, num_blocks)
    np.subtract.at(change, first + count, num_blocks)
    own_key = np.cumsum(change)[:-1] * BLOCK_SIZE
    segments = np.empty(len(fields) + num_sequences, dtype=_SEGMENT)
    segments["row_begin"] = np.concatenate([starts[first], starts[:-1]])
    segments["row_end"] = np.concatenate([starts[first + count], starts[1:]])
    segments["sequence"] = np.concatenate([first, np.arange(num_sequences)])
    segments["first_key"] = np.concatenate([first_block * BLOCK_SIZE, own_key])
    segments["num_keys"] = np.concatenate([num_blocks * BLOCK_SIZE, batch.seq_lens - own_key])
    return segments[(segments["row_end"] > segments["row_begin"]) & (segments["num_keys"] > 0)]
