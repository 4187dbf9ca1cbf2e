"""The tensor types of GGUF that Gristmill reads, and their vectorized dequantization to float32.

Block layouts as in ggml: a block of 32 weights is one float16 scale d (and a minimum m), then the weights;
4-bit weights keep element i in the low half and element i + 16 in the high half of byte i.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

# name -> (weights in a block, bytes in a block)
BLOCK_SHAPES = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
}

_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


def tensor_type_name(type_id: int) -> str:
    """The usual name of a ggml tensor type."""
    return _TYPE_NAMES.get(type_id, f"of unknown type {type_id}")


def row_bytes(type_name: str, num_columns: int) -> int:
    """Bytes of one row of `num_columns` weights."""
    block_elements, block_bytes = BLOCK_SHAPES[type_name]
    return num_columns // block_elements * block_bytes


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Dequantize whole blocks. raw: uint8, consecutive blocks in any shape; returns float32 [num_weights]."""
    flat = np.ascontiguousarray(raw).reshape(-1)
    if type_name == "F32":
        return flat.view("<f4").astype(np.float32, copy=False)
    if type_name == "F16":
        return flat.view("<f2").astype(np.float32)
    if type_name == "BF16":
        return (flat.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    blocks = flat.reshape(-1, BLOCK_SHAPES[type_name][1])
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)  # [num_blocks, 1]
    if type_name == "Q8_0":
        return (blocks[:, 2:].view(np.int8) * scale).reshape(-1)
    if type_name == "Q4_0":
        weights = _unpack_nibbles(blocks[:, 2:])
        weights -= 8.0
        weights *= scale
        return weights.reshape(-1)
    assert type_name == "Q4_1", type_name
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    weights = _unpack_nibbles(blocks[:, 4:])
    weights *= scale
    weights += minimum
    return weights.reshape(-1)


def _unpack_nibbles(packed: Bytes) -> Floats:
    """packed: [num_blocks, 16] uint8 -> float32 [num_blocks, 32]."""
    weights = np.empty((len(packed), 32), np.float32)
    weights[:, :16] = packed & 0x0F
    weights[:, 16:] = packed >> 4
    return weights
