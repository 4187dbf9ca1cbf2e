"""Weights of a checkpoint as torch tensors, one at a time, under their Hugging Face names.

Rows are read and dequantized in slices, so the memory beyond the result stays small for any tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch

from engine.checkpoint import Checkpoint, TensorSource
from engine.gguf_quants import BLOCK_SHAPES, dequantize, row_bytes
from engine.weight_names import expected_shapes

_SLICE_ELEMENTS = 1 << 20
_TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def iterate_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, contiguous tensor of `dtype`) for each weight the model reads, in file order.

    q and k projections of llama GGUF files come back in the half-rotation order of Hugging Face.
    """
    wanted = expected_shapes(checkpoint.config)
    sources = [(name, source) for name, source in checkpoint.tensors.items() if name in wanted]
    for name, source in sorted(sources, key=lambda item: (item[1].file, item[1].offset)):
        yield name, load_tensor(source, dtype)


def load_tensor(source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    """Read one tensor. Returns a contiguous tensor of the source's shape and of `dtype`."""
    num_rows = source.shape[0]
    num_columns = prod(source.shape[1:])
    size = row_bytes(source.type, num_columns) if num_columns > 1 else BLOCK_SHAPES[source.type][1]
    if num_columns == 1 and BLOCK_SHAPES[source.type][0] > 1:  # a quantized vector: one row
        num_rows, num_columns, size = 1, source.shape[0], source.num_bytes
    raw = np.memmap(source.file, np.uint8, "r", source.offset, (num_rows, size))
    order = _row_order(num_rows, source.rotary_heads) if source.rotary_heads else None
    result = torch.empty((num_rows, num_columns), dtype=dtype)
    step = max(1, _SLICE_ELEMENTS // num_columns)
    for start in range(0, num_rows, step):
        rows = raw[start : start + step] if order is None else raw[order[start : start + step]]
        target = result[start : start + step]
        if source.type in _TORCH_TYPES:
            target.copy_(torch.from_numpy(np.array(rows)).view(_TORCH_TYPES[source.type]))
        elif dtype == torch.float32:  # numpy's copy: torch's would start threads for every slice
            target.numpy()[...] = dequantize(rows, source.type).reshape(-1, num_columns)
        else:
            target.copy_(torch.from_numpy(dequantize(rows, source.type)).view(-1, num_columns))
    return result.view(source.shape)


def _row_order(num_rows: int, num_heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which row of a GGUF llama projection is row i in Hugging Face's order.

    GGUF interleaves the halves of a head (x0 y0 x1 y1 ..), Hugging Face keeps them apart (x0 x1 .. y0 y1 ..).
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
