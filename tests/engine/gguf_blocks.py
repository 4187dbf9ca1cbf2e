"""Blocks of GGUF types for tests: literal bytes with their weights worked out by hand, and random ones."""

from __future__ import annotations

import numpy as np

from gristmill.engine.checkpoint.gguf_quants import BLOCK_SHAPES

_RISING = "F0E1D2C3B4A5968778695A4B3C2D1E0F"  # weights 0 to 15 have codes 0 to 15, the next ones 15 to 0
_UP, _DOWN = list(range(16)), list(range(15, -1, -1))
# d = 1.0, dmin = 0.5, sc = 1 2 3 63 20 33 62 5, m = 0 4 40 63 2 17 35 48
_K_HEAD = "003C0038" + "4182C33F0044A8FF24113E05"
_K_NIBBLES = "21" * 32 + "43" * 32 + "65" * 32 + "F0" * 32  # codes 1 to 6, 0, 15 by group


def _groups(size: int, *weights: float) -> list[float]:
    return [weight for weight in weights for _ in range(size)]


# name -> (bytes of one block, its weights)
GOLDEN: dict[str, tuple[bytes, list[float]]] = {
    name: (bytes.fromhex(text), [float(weight) for weight in weights])  # type: ignore[attr-defined]
    for name, text, weights in [
        ("Q4_0", "0038" + _RISING, [0.5 * (code - 8) for code in _UP + _DOWN]),
        ("Q4_1", "003800BC" + _RISING, [0.5 * code - 1 for code in _UP + _DOWN]),
        ("Q5_0", "003C" + "01000080" + _RISING, [0, *range(-15, 0), *range(-1, -16, -1), 0]),
        ("Q5_1", "003800BC" + "01000080" + _RISING, [7, *(0.5 * c - 1 for c in _UP[1:] + _DOWN[:-1]), 7]),
        ("Q8_0", "0034" + bytes(range(240, 256)).hex() + bytes(range(16)).hex(), np.arange(-16, 16) / 4),
        ("Q4_K", _K_HEAD + _K_NIBBLES, _groups(32, 1, 2, -11, 220.5, 99, 189.5, -17.5, 51)),
        ("Q5_K", _K_HEAD + "81" * 32 + _K_NIBBLES, _groups(32, 17, 2, -11, 220.5, 99, 189.5, -17.5, 131)),
        (
            "Q6_K",
            "21" * 64 + "F0" * 64 + "E4" * 32 + "1B" * 32 + "0102FFFE0304FDFC0506FBFA7F800708" + "0038",
            _groups(16, -15.5, -31, 7.5, 15, 3, 4, -27, -36, 40, 48, 0, 0, -63.5, 64, -59.5, -68),
        ),
    ]
}


def random_blocks(type_name: str, num_rows: int, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Any bytes, but that scales are finite: uint8 [num_rows, num_blocks * bytes of a block]."""
    size = BLOCK_SHAPES[type_name][1]
    raw = np.random.default_rng(seed).integers(0, 256, (num_rows, num_blocks, size), np.uint8)
    for high_byte in (209,) if type_name == "Q6_K" else (1, 3):
        raw[:, :, high_byte] &= 0xBF
    return raw.reshape(num_rows, -1)
