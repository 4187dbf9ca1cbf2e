"""The tensor types of GGUF that Gristmill reads: their blocks taken apart into codes and scales, and dequantized.

Block layouts as in ggml (ggml-common.h). A type of 32 weights a block has one scale; a K-quant has 256 weights in
8 or 16 groups, each with a small integer that multiplies the block's float16 scale. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Codes = np.ndarray[Any, np.dtype[np.uint8]] | np.ndarray[Any, np.dtype[np.int8]]
Halves = np.ndarray[Any, np.dtype[np.float16]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

# name -> (weights in a block, bytes in a block)
BLOCK_SHAPES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}

_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


class CodeShape(NamedTuple):
    """What a quantized type becomes in memory. kind: int4 or int8; scale_bytes: of one scale, and of one offset."""

    kind: str
    group_size: int
    scale_bytes: int
    has_offsets: bool

    @property
    def bits_per_weight(self) -> float:
        """Codes, scales and offsets, over the weights."""
        code_bits = 4 if self.kind == "int4" else 8
        return code_bits + 8 * self.scale_bytes * (1 + self.has_offsets) / self.group_size


# The product of a float16 scale and an integer needs more than float16's 11 bits, so K-quants have float32 scales.
CODE_SHAPES = {
    "Q8_0": CodeShape("int8", 32, 2, False),
    "Q4_0": CodeShape("int4", 32, 2, False),
    "Q4_1": CodeShape("int4", 32, 2, True),
    "Q5_0": CodeShape("int8", 32, 2, False),
    "Q5_1": CodeShape("int8", 32, 2, True),
    "Q4_K": CodeShape("int4", 32, 4, True),
    "Q5_K": CodeShape("int8", 32, 4, True),
    "Q6_K": CodeShape("int8", 16, 4, False),
}
INT4_ZERO = 8  # the code of 0 where an int4 type has no offsets


class BlockParts(NamedTuple):
    """Blocks taken apart: weight = code * scale + offset, without offsets code * scale.

    codes: [num_blocks, block_elements], weights in order; uint8 from 0 to 15 for int4 (0 is INT4_ZERO where there are
    no offsets), else int8. scales, offsets: [num_blocks, groups of a block], float16 or float32.
    """

    codes: Codes
    scales: Halves | Floats
    offsets: Halves | Floats | None


def tensor_type_name(type_id: int) -> str:
    """The usual name of a ggml tensor type."""
    return _TYPE_NAMES.get(type_id, f"of unknown type {type_id}")


def row_bytes(type_name: str, num_columns: int) -> int:
    """Bytes of one row of `num_columns` weights."""
    block_elements, block_bytes = BLOCK_SHAPES[type_name]
    return num_columns // block_elements * block_bytes


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Dequantize whole blocks. raw: uint8, consecutive blocks in any shape; returns float32 [num_weights]."""
    if type_name in CODE_SHAPES:
        return _dequantize_blocks(raw, type_name)
    flat = np.ascontiguousarray(raw).reshape(-1)
    if type_name == "F32":
        return flat.view("<f4").astype(np.float32, copy=False)
    if type_name == "F16":
        return flat.view("<f2").astype(np.float32)
    assert type_name == "BF16", type_name
    return (flat.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def split_blocks(raw: Bytes, type_name: str) -> BlockParts:
    """Take blocks of a type of CODE_SHAPES apart. raw: uint8, consecutive blocks in any shape."""
    blocks = np.ascontiguousarray(raw).reshape(-1, BLOCK_SHAPES[type_name][1])
    with np.errstate(
        invalid="ignore"
    ):  # infinity times zero: whoever reads scales looks whether they are finite
        return _SPLITTERS[type_name](blocks)


def _dequantize_blocks(raw: Bytes, type_name: str) -> Floats:
    codes, scales, offsets = split_blocks(raw, type_name)
    weights: Floats = codes.astype(np.float32).reshape(*scales.shape, -1)
    if codes.dtype == np.uint8 and offsets is None:
        weights -= INT4_ZERO
    weights *= scales.astype(np.float32)[:, :, None]
    if offsets is not None:
        weights += offsets.astype(np.float32)[:, :, None]
    return weights.reshape(-1)


def _split_q8_0(blocks: Bytes) -> BlockParts:
    return BlockParts(blocks[:, 2:].view(np.int8), _half(blocks, 0), None)


def _split_q4_0(blocks: Bytes) -> BlockParts:
    return BlockParts(_unpack(blocks[:, 2:], 4, 16), _half(blocks, 0), None)


def _split_q4_1(blocks: Bytes) -> BlockParts:
    return BlockParts(_unpack(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _split_q5_0(blocks: Bytes) -> BlockParts:
    codes = _unpack(blocks[:, 6:], 4, 16) | _unpack(blocks[:, 2:6], 1, 1) << 4
    return BlockParts(codes.view(np.int8) - np.int8(16), _half(blocks, 0), None)


def _split_q5_1(blocks: Bytes) -> BlockParts:
    codes = _unpack(blocks[:, 8:], 4, 16) | _unpack(blocks[:, 4:8], 1, 1) << 4
    return BlockParts(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _split_q4_k(blocks: Bytes) -> BlockParts:
    return BlockParts(_unpack(blocks[:, 16:], 4, 32), *_k_scales(blocks))


def _split_q5_k(blocks: Bytes) -> BlockParts:
    codes = _unpack(blocks[:, 48:], 4, 32) | _unpack(blocks[:, 16:48], 1, 32) << 4
    return BlockParts(codes.view(np.int8), *_k_scales(blocks))


def _split_q6_k(blocks: Bytes) -> BlockParts:
    codes = _unpack(blocks[:, :128], 4, 64) | _unpack(blocks[:, 128:192], 2, 32) << 4
    scales = _half(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return BlockParts(codes.view(np.int8) - np.int8(32), scales, None)


_SPLITTERS: dict[str, Callable[[Bytes], BlockParts]] = {
    "Q8_0": _split_q8_0,
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}


def _half(blocks: Bytes, at: int) -> Halves:
    """The float16 number at byte `at` of each block: [num_blocks, 1]."""
    return blocks[:, at : at + 2].copy().view("<f2")


def _unpack(packed: Bytes, num_bits: int, run: int) -> Bytes:
    """Fields of `num_bits` bits: [num_blocks, num_bytes] -> uint8 [num_blocks, num_bytes * 8 / num_bits].

    Each run of `run` bytes holds first the lowest field of all its bytes, then the next one of all.
    """
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8((1 << num_bits) - 1)
    return fields.reshape(len(packed), -1)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales d * sc and offsets -dmin * m of Q4_K and Q5_K: [num_blocks, 8] each.

    Of the twelve bytes after d and dmin, 0 to 3 hold sc of the first four groups and 4 to 7 their m, in six bits;
    8 to 11 hold four bits of the last four groups' sc and of their m, whose other two are on top of bytes 0 to 7.
    """
    six, four = blocks[:, 4:12], blocks[:, 12:16]
    first = six & 63  # four of sc, four of m
    last = np.concatenate([four & 15, four >> 4], 1) | six >> 6 << 4
    multipliers = np.concatenate([first[:, :4], last[:, :4]], 1)
    minima = np.concatenate([first[:, 4:], last[:, 4:]], 1)
    scales = _half(blocks, 0).astype(np.float32) * multipliers
    return scales, -(_half(blocks, 2).astype(np.float32) * minima)
