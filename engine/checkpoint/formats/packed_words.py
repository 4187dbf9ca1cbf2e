"""AWQ's and GPTQ's 32-bit words of codes and zero points as canonical tensors; what the tensors mean is their schemes'.

Both formats say W = (code - zero point) * scale, with scales [num_groups, num_rows].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.engine.checkpoint.formats.scheme import check_scales
from gristmill.engine.errors import ModelRefused
from gristmill.kernels.quantized import QuantizedTensor, narrow_scales, pack_int4


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The numbers in words, the lowest bits first. words: [..., n] int32 or int64; [..., n * 32 / bits] of its type."""
    mask = (1 << bits) - 1
    return torch.stack([words >> shift & mask for shift in range(0, 32, bits)], -1).flatten(-2)


def build_from_codes(
    name: str,
    bits: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group_size: int,
    columns: Tensor | None = None,
) -> QuantizedTensor:
    """The weight of module `name` from canonical codes. zeros: [num_groups, num_rows] of any integer type.

    zeros None: they are all in the middle, 8 or 128. Raises ModelRefused where scales are not finite.
    """
    exact = check_scales(f"{name}.scales", scales).float()
    middle = 1 << (bits - 1)
    offsets = None
    if zeros is not None and not (zeros == middle).all():
        origin = 0 if bits == 4 else middle  # the code that is 0 in a canonical tensor with offsets
        offsets = (origin - zeros) * exact
    narrow, offsets = narrow_scales(exact, offsets)
    return QuantizedTensor("int4" if bits == 4 else "int8", codes, narrow, group_size, offsets, columns)


def codes_from_words_of_rows(words: Tensor, order: Sequence[int]) -> Tensor:
    """int4 codes where a word has one column of eight rows, order[i] of them in its bits 4i to 4i + 3.

    words: [num_columns, num_rows / 8] int32; uint8 [num_rows, num_columns / 2].
    """
    lines = words.T.contiguous()  # [num_rows / 8, num_columns]
    even, odd = lines[:, 0::2].contiguous(), lines[:, 1::2].contiguous()
    codes = torch.empty((len(lines), 8, even.shape[1]), dtype=torch.uint8)
    for place, row in enumerate(order):
        codes[:, row] = (even >> 4 * place & 15) | (odd >> 4 * place & 15) << 4
    return codes.flatten(0, 1)


def codes_from_words_of_columns(words: Tensor, bits: int, columns: Tensor | None) -> Tensor:
    """Canonical codes where a word has neighbouring columns of one row, the first in the lowest bits.

    words: [num_columns * bits / 32, num_rows] int32; columns: [num_columns] int64, their order in the result.
    """
    lines = words.T.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:  # bytes of little-endian words are pairs of columns already
        return take_columns(lines, columns)
    return take_columns((lines ^ 128).view(torch.int8), columns)  # 0 to 255 become -128 to 127


def take_columns(codes: Tensor, columns: Tensor | None) -> Tensor:
    """Canonical codes, int4 where they are uint8, with the columns in this order."""
    if columns is None:
        return codes
    if codes.dtype == torch.uint8:
        return pack_int4(torch.stack([codes & 15, codes >> 4], 2).flatten(1)[:, columns])
    return codes[:, columns]


def sort_columns(name: str, groups: Tensor, group_size: int, unset: int | None) -> Tensor | None:
    """The order that puts the columns of each group together, [num_columns] int64; None: they are together.

    groups: [num_columns], the group of each column, from tensor `name`; raises ModelRefused where that can't be.
    unset: this number in every column means columns in order, as the readers of such files take it.
    """
    if groups.dtype not in (torch.int32, torch.int64):
        raise ModelRefused(f"tensor {name} holds {groups.dtype}, not int32; quantize the model again")
    groups = groups.long()
    if torch.equal(groups, torch.arange(len(groups)) // group_size) or (
        unset is not None and (groups == unset).all()
    ):
        return None
    num_groups = len(groups) // group_size
    outside = groups[(groups < 0) | (groups >= num_groups)]
    if len(outside):
        raise ModelRefused(
            f"tensor {name} names group {int(outside[0])}, but there are {num_groups};"
            " the checkpoint is damaged, get it again"
        )
    sizes = torch.bincount(groups, minlength=num_groups)
    wrong = (sizes != group_size).nonzero()
    if len(wrong):
        group = int(wrong[0])
        raise ModelRefused(
            f"tensor {name} puts {int(sizes[group])} columns in group {group}, not {group_size};"
            " the checkpoint is damaged, get it again"
        )
    return torch.argsort(groups, stable=True)
