"""GGUF matrices as the canonical quantized tensor: the file's own codes and scales, never rounded a second time.

Five- and six-bit codes become bytes; scales that are products of two numbers become float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch

from gristmill.engine.checkpoint.formats.scheme import check_scales
from gristmill.engine.checkpoint.gguf_quants import BLOCK_SHAPES, CODE_SHAPES, Bytes, Codes, split_blocks
from gristmill.engine.checkpoint.tensor_sources import TensorSource
from gristmill.kernels.quantized import Kind, QuantizedTensor

MAX_SLICE_WEIGHTS = 1 << 20


def can_keep_codes(source: TensorSource) -> bool:
    """Whether the tensor is a matrix of a quantized GGUF type."""
    return source.type in CODE_SHAPES and len(source.shape) == 2


def load_codes(source: TensorSource, name: str = "") -> QuantizedTensor:
    """Read one matrix, q and k of llama files in Hugging Face's order; beyond the result takes a few MB.

    Raises ModelRefused, with the tensor's name, where a scale or an offset is not a finite number.
    """
    assert can_keep_codes(source), source
    num_rows = source.shape[0]
    tensor = _collect(source.type, num_rows, source.num_bytes // num_rows, iterate_rows(source))
    place = f"{name or f'at byte {source.offset}'} of {source.file}"
    for numbers in (tensor.scales, tensor.offsets):
        if numbers is not None:
            check_scales(place, numbers)
    return tensor


def to_codes(raw: Bytes, type_name: str) -> QuantizedTensor:
    """The matrix whose rows these bytes are. raw: uint8 [num_rows, row_bytes]; type_name: of CODE_SHAPES."""
    num_rows, row_size = raw.shape
    return _collect(type_name, num_rows, row_size, [(0, raw)])


def iterate_rows(source: TensorSource) -> Iterator[tuple[int, Bytes]]:
    """Yield (index of the first row, raw uint8 [num_rows, row_bytes]) over all rows in Hugging Face's order.

    A number of a vector is a row, but a vector in blocks is one row.
    """
    block_elements, block_bytes = BLOCK_SHAPES[source.type]
    num_rows = 1 if len(source.shape) == 1 and block_elements > 1 else source.shape[0]
    row_size = source.num_bytes // num_rows
    raw = np.memmap(source.file, np.uint8, "r", source.offset, (num_rows, row_size))
    order = row_order(num_rows, source.rotary_heads) if source.rotary_heads else None
    step = max(1, MAX_SLICE_WEIGHTS // (row_size // block_bytes * block_elements))
    for start in range(0, num_rows, step):
        yield start, raw[start : start + step] if order is None else raw[order[start : start + step]]


def row_order(num_rows: int, num_heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which row of a GGUF llama projection is row i in Hugging Face's order.

    GGUF interleaves the halves of a head (x0 y0 x1 y1 ..), Hugging Face keeps them apart (x0 x1 .. y0 y1 ..).
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _collect(
    type_name: str, num_rows: int, row_size: int, slices: Iterable[tuple[int, Bytes]]
) -> QuantizedTensor:
    """One tensor from slices of raw rows, each with the index of its first row."""
    shape = CODE_SHAPES[type_name]
    block_elements, block_bytes = BLOCK_SHAPES[type_name]
    num_columns = row_size // block_bytes * block_elements
    is_int4 = shape.kind == "int4"
    codes = np.empty(
        (num_rows, num_columns // 2 if is_int4 else num_columns), np.uint8 if is_int4 else np.int8
    )
    scales = np.empty((num_columns // shape.group_size, num_rows), f"f{shape.scale_bytes}")
    offsets = np.empty_like(scales) if shape.has_offsets else None
    for start, raw in slices:
        rows = slice(start, start + len(raw))
        parts = split_blocks(raw, type_name)
        codes[rows] = (_pack(parts.codes) if is_int4 else parts.codes).reshape(len(raw), -1)
        scales[:, rows] = parts.scales.reshape(len(raw), -1).T
        if offsets is not None:
            assert parts.offsets is not None
            offsets[:, rows] = parts.offsets.reshape(len(raw), -1).T
    return QuantizedTensor(
        cast(Kind, shape.kind),
        torch.from_numpy(codes),
        torch.from_numpy(scales),
        shape.group_size,
        None if offsets is None else torch.from_numpy(offsets),
    )


def _pack(codes: Codes) -> Bytes:
    """Two codes to a byte, the even one in the low half. codes: uint8 [.., n] -> [.., n / 2]."""
    pairs = codes.view(np.uint16)
    packed: Bytes = (pairs | pairs >> 4).astype(np.uint8)
    return packed
