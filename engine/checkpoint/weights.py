"""Weights of a checkpoint, one at a time, under their Hugging Face names: torch tensors, or codes as they are stored.

Rows are read in slices, so the memory beyond the result stays small for any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from gristmill.engine.checkpoint.gguf_codes import can_keep_codes, iterate_rows, load_codes
from gristmill.engine.checkpoint.gguf_quants import dequantize
from gristmill.engine.checkpoint.opening import Checkpoint
from gristmill.engine.checkpoint.tensor_sources import QuantizedSource, TensorSource
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.errors import ModelRefused
from gristmill.kernels.quantized import QuantizedTensor

_TORCH_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
Weight = Tensor | QuantizedTensor


def iterate_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[tuple[str, Weight]]:
    """Yield (Hugging Face name, weight) for each weight the model reads, in file order.

    A weight is a contiguous tensor of `dtype`, or a QuantizedTensor where the file has codes. q and k projections of
    llama GGUF files come back in the half-rotation order of Hugging Face.
    """
    wanted = expected_shapes(checkpoint.config)
    sources = [(name, source) for name, source in checkpoint.tensors.items() if name in wanted]
    for name, source in sorted(sources, key=lambda item: _place(item[1])):
        yield name, load_weight(checkpoint.path, name, source, dtype)


def load_weight(path: str, name: str, source: TensorSource | QuantizedSource, dtype: torch.dtype) -> Weight:
    """One weight of the checkpoint at `path`. Raises ModelRefused where its numbers can't be."""
    if isinstance(source, QuantizedSource):
        parts = {suffix: load_part(part) for suffix, part in source.parts.items()}
        try:
            return source.scheme.build(name.removesuffix(".weight"), parts)
        except ModelRefused as error:
            raise ModelRefused(f"{path}: {error}") from error
    if can_keep_codes(source):
        return load_codes(source, name)
    return load_tensor(source, dtype)


def dequantized(weights: Iterator[tuple[str, Weight]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same weights, those in codes turned into tensors of `dtype`."""
    for name, weight in weights:
        yield name, weight.dequantize().to(dtype) if isinstance(weight, QuantizedTensor) else weight


def quantized(
    weights: Iterator[tuple[str, Weight]], quantize: Callable[[Tensor], QuantizedTensor]
) -> Iterator[tuple[str, Weight]]:
    """The same weights, those of the layers' linears put through `quantize`; embeddings and head stay as they are."""
    for name, weight in weights:
        if name.endswith("_proj.weight") and isinstance(weight, Tensor):
            weight = quantize(weight)
        yield name, weight


def load_part(source: TensorSource) -> Tensor:
    """One tensor as it is stored, of its own type."""
    raw = np.fromfile(source.file, np.uint8, source.num_bytes, offset=source.offset)
    return torch.from_numpy(raw).view(_TORCH_TYPES[source.type]).view(source.shape)


def load_tensor(source: TensorSource, dtype: torch.dtype) -> Tensor:
    """Read one tensor. Returns a contiguous tensor of the source's shape and of `dtype`."""
    if len(source.shape) == 1 and source.type not in _TORCH_TYPES:  # a vector in blocks is one row
        return load_tensor(replace(source, shape=(1, *source.shape)), dtype).view(-1)
    num_columns = prod(source.shape[1:])
    result = torch.empty((source.shape[0], num_columns), dtype=dtype)
    for start, rows in iterate_rows(source):
        target = result[start : start + len(rows)]
        if source.type in _TORCH_TYPES:
            target.copy_(torch.from_numpy(np.array(rows)).view(_TORCH_TYPES[source.type]))
        elif dtype == torch.float32:  # numpy's copy: torch's would start threads for every slice
            target.numpy()[...] = dequantize(rows, source.type).reshape(-1, num_columns)
        else:
            target.copy_(torch.from_numpy(dequantize(rows, source.type)).view(-1, num_columns))
    return result.view(source.shape)


def _place(source: TensorSource | QuantizedSource) -> tuple[str, int]:
    """Where the weight begins in the files."""
    parts = source.parts.values() if isinstance(source, QuantizedSource) else [source]
    return min((part.file, part.offset) for part in parts)
