"""What a step of attention.py is cut into: few large calls of torch's kernel.

One call per shared-prefix group (read once for all rows of the group: cascade), one per bucket of decode rows of like
length and one per bucket of prefill rows of like length. Knows block ids and lengths only, no keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.kernels.contract import AttentionBatch

MAX_BUCKET_ROWS = 64  # decode rows in a call: more would pad short rows up to long ones
MAX_MASK_ELEMENTS = 1 << 22  # of a prefill bucket's mask


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Query rows `rows` (a slice of the step) against the whole of some blocks."""

    rows: slice
    blocks: Tensor  # [num_blocks] int64


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Rows of one query each. rows: [n]; blocks: [n * max_blocks]; mask: [n, 1, 1, max_blocks * block_size]."""

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """Rows of several queries, padded to one length. gather: [n * max_queries]; scatter: [num_tokens], the step's rows;
    valid: [num_tokens], their places in the padded layout; mask None: causal and without earlier tokens.
    """

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
    prefixes: tuple[PrefixCall, ...]
    decodes: tuple[DecodeCall, ...]
    prefills: tuple[PrefillCall, ...]


def plan_calls(batch: AttentionBatch, block_size: int) -> AttentionPlan:
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
        prefixes.append(PrefixCall(rows, torch.from_numpy(blocks)))
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
) -> DecodeCall:
    num_blocks = int(-(-own_lens[sequences].max() // block_size))
    key = np.arange(num_blocks * block_size)
    hidden = key >= own_lens[sequences, None]
    if batch.sliding_window is not None:
        hidden |= key <= own_lens[sequences, None] - 1 - batch.sliding_window
    return DecodeCall(
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
) -> PrefillCall:
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
    return PrefillCall(
        len(sequences),
        torch.from_numpy(rows.ravel()),
        torch.from_numpy(np.flatnonzero(present)),
        torch.from_numpy(rows[present]),
        _own_blocks(sequences, batch, first_blocks, num_blocks),
        mask,
    )


def _mask(hidden: NDArray[np.bool_]) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), float("-inf"))
