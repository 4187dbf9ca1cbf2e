"""Packs AWQ and GPTQ tensors from the formats' formulae, in numpy: what the loaders are tested against.

Shares no code with engine or kernels. q: codes [num_rows, num_columns]; zeros: zero points [num_groups, num_rows].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.int64]


def exact_weight(q: Array, zeros: Array, scales: NDArray[np.float64], groups: Array) -> NDArray[np.float64]:
    """(q - zero) * scale, the group of column k being groups[k]. scales: [num_groups, num_rows]."""
    weight = np.empty(q.shape)
    for column, group in enumerate(groups):
        weight[:, column] = (q[:, column] - zeros[group]) * scales[group]
    return weight


def pack_awq(values: Array) -> NDArray[np.int32]:
    """[n, num_rows] of 0 to 15 to [n, num_rows / 8]: rows 0, 2, 4, 6, 1, 3, 5, 7 of each eight from low to high."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place in range(8):
            row = 8 * word + (2 * place if place < 4 else 2 * (place - 4) + 1)
            words[:, word] += values[:, row].astype(np.uint32) * np.uint32(16**place)
    return words.view(np.int32)


def pack_awq_tensors(q: Array, zeros: Array) -> dict[str, NDArray[np.int32]]:
    """qweight [num_columns, num_rows / 8] and qzeros [num_groups, num_rows / 8]."""
    return {"qweight": pack_awq(q.T), "qzeros": pack_awq(zeros)}


def pack_gptq_lines(values: Array, bits: int) -> NDArray[np.int32]:
    """[n, m] to [n, m * bits / 32]: neighbours in one word, the first in its lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(values), values.shape[1] // per_word), np.uint32)
    for index in range(values.shape[1]):
        shift = np.uint32(bits * (index % per_word))
        words[:, index // per_word] |= values[:, index].astype(np.uint32) << shift
    return words.view(np.int32)


def pack_gptq_tensors(q: Array, zeros: Array, bits: int, form: str) -> dict[str, NDArray[np.int32]]:
    """qweight [num_columns * bits / 32, num_rows] and qzeros [num_groups, num_rows * bits / 32].

    form: same (gptq_v2), less_one (gptq) or words_less_one (gptq, as GPTQModel's v2-to-v1 conversion makes it).
    """
    if form == "less_one":
        zeros = (zeros - 1) % (1 << bits)
    qzeros = pack_gptq_lines(zeros, bits)
    if form == "words_less_one":
        ones = {4: 0x11111111, 8: 0x01010101}[bits]
        less = (qzeros.astype(np.int64) - ones) % (1 << 32)
        qzeros = less.astype(np.uint32).view(np.int32)
    return {"qweight": np.ascontiguousarray(pack_gptq_lines(q, bits).T), "qzeros": qzeros}
