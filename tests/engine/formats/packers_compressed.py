"""Tensors of compressed-tensors checkpoints, made and read back by the compressed-tensors package itself; for tests."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor


def build_scheme(**weights: Any) -> QuantizationScheme:
    """The package's scheme of one config group. weights: keys of the group's `weights`."""
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compress(
    weight: Tensor, storage: str, scheme: QuantizationScheme, scale_dtype: torch.dtype
) -> dict[str, Tensor]:
    """A module's tensors in the format `storage`. weight: [N, K] float32; scales cover the largest values."""
    args = scheme.weights
    assert args is not None
    low, high = (-(1 << (args.num_bits - 1)), (1 << (args.num_bits - 1)) - 1)
    least, most = _extremes(weight, args)
    if args.type == "float":
        scale, zeros = torch.maximum(-least, most) / 448, None
    elif args.symmetric:
        scale, zeros = torch.maximum(-least, most) / (high + 0.5), None
    else:
        scale = (most - least) / (high - low)
        zeros = (low - least / scale).round().clamp(low, high).to(torch.int8)
    state = {"weight": weight, "weight_scale": scale.to(scale_dtype)}
    if zeros is not None:
        state["weight_zero_point"] = zeros
    return _compressor(storage).compress(state, scheme)


def decompress(tensors: dict[str, Tensor], storage: str, scheme: QuantizationScheme) -> Tensor:
    """W as the package reads it, in float32 arithmetic: [N, K]."""
    state = dict(tensors)
    state["weight_scale"] = state["weight_scale"].float()
    return _compressor(storage).decompress(state, scheme)["weight"]


def _compressor(storage: str) -> Any:
    return BaseCompressor.get_value_from_registry(storage)


def _extremes(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and largest number, 0 among them, that each scale is for, in the shape of the scales."""
    num_rows, num_columns = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        shape: tuple[int, ...] = (1,)
    elif args.strategy == "block":
        assert args.block_structure is not None
        height, width = args.block_structure
        tall, wide = -num_rows % height, -num_columns % width
        padded = torch.nn.functional.pad(weight, (0, wide, 0, tall))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [R, height, C, width]
        shape = (blocks.shape[0], blocks.shape[2])
        parts = blocks.transpose(1, 2).reshape(shape[0] * shape[1], -1)
    else:
        size = args.group_size if args.strategy == "group" else num_columns
        assert size is not None
        parts = weight.reshape(-1, size)
        shape = (num_rows, num_columns // size)
    return parts.amin(1).clamp(max=0).reshape(shape), parts.amax(1).clamp(min=0).reshape(shape)
