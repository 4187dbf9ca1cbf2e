"""What a step of paged.py is cut into: tiles of query rows, and the segments of keys that each tile sees."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels.contract import AttentionBatch

BLOCK_SIZE = 16
MIN_TILE_ROWS, MAX_TILE_ROWS = 8, 32
NUM_ITEMS_PER_THREAD = 4  # work items that a step is cut into, at least: they cost unlike amounts
_SEGMENT = np.dtype(
    [(name, np.int32) for name in ("row_begin", "row_end", "sequence", "first_key", "num_keys")]
)


def plan_arrays(batch: AttentionBatch, num_threads: int) -> dict[str, NDArray[Any]]:
    """The arrays of AttendArgs (kernels/cpu/src/attention.h) that describe a step, by their names there."""
    positions = batch.positions()
    tile_starts = plan_tiles(batch.query_start_loc, num_threads)
    segments, segment_starts, costs = plan_segments(batch, positions, tile_starts)
    return {
        "block_tables": np.ascontiguousarray(batch.block_tables, dtype=np.int32),
        "positions": positions.astype(np.int32),
        "tile_starts": tile_starts.astype(np.int32),
        "tile_order": np.argsort(-costs, kind="stable").astype(np.int32),
        "segment_starts": segment_starts,
        "segments": segments,
    }


def decodes_on(batch: AttentionBatch, last: AttentionBatch) -> bool:
    """Whether each sequence has one row, and is what it was in the last step but for one more token."""
    num_sequences = len(batch.seq_lens)
    return (
        num_sequences == len(last.seq_lens) == batch.query_start_loc[-1]
        and batch.groups is last.groups
        and batch.sliding_window == last.sliding_window
        and np.array_equal(batch.query_start_loc, last.query_start_loc)
        and np.array_equal(batch.seq_lens, last.seq_lens + 1)
    )


def grow_arrays(arrays: dict[str, NDArray[Any]], batch: AttentionBatch) -> dict[str, NDArray[Any]]:
    """plan_arrays(batch) from those of the last step, after which the batch decodes on: a tenth of the work.

    Only the order of the tiles may differ from a plan of its own.
    """
    segments = arrays["segments"].copy()
    segments["num_keys"] += segments["row_end"] - segments["row_begin"] == 1  # not those of groups
    tables = np.ascontiguousarray(batch.block_tables, dtype=np.int32)
    return {**arrays, "block_tables": tables, "positions": arrays["positions"] + 1, "segments": segments}


def plan_tiles(starts: NDArray[np.int64], num_threads: int) -> NDArray[np.int64]:
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


def plan_segments(
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
