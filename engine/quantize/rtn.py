"""Rounding to nearest: scales from a weight matrix alone, and the codes of given scales.

Used as a weight is loaded, and as the last step of the other methods. Scales are rounded to the type they are stored
in before any code is made, so the codes fit the scales that readers see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gristmill.engine.config import ModelConfig
from gristmill.kernels.quantized import INT4_ZERO, Kind, QuantizedTensor, narrow_scales, pack_int4

GROUP_SIZES = (128, 64, 32)
MAX_CODES = {"int4": 7.5, "int8": 127.0, "fp8": 448.0}  # what the largest weight of a group becomes
GROUP_UNIT = 8  # columns: an int32 of eight codes belongs to one group
_SLICE_ELEMENTS = 1 << 22  # of float32 at a time
_STEPS = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # parts of the range that are tried


def default_group_size(config: ModelConfig) -> int:
    """The largest of GROUP_SIZES that divides the columns of every linear layer. Raises ValueError with the remedy."""
    columns = linear_columns(config)
    for size in GROUP_SIZES:
        if not any(num_columns % size for num_columns in columns):
            return size
    raise ValueError(
        f"no group size of {_listed(GROUP_SIZES)} divides each of {_listed(columns)} columns;"
        " use int8 or fp8, which have one scale a row"
    )


def linear_columns(config: ModelConfig) -> tuple[int, ...]:
    """The numbers of columns that the linear layers have, ascending."""
    return tuple(sorted({config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size}))


def check_groups(config: ModelConfig, group_size: int) -> None:
    """Raises ValueError where the linear layers can't have int4 groups of that size."""
    if group_size < GROUP_UNIT or group_size % GROUP_UNIT:
        raise ValueError(f"group size {group_size} is not a multiple of {GROUP_UNIT}; use 128, 64 or 32")
    for num_columns in linear_columns(config):
        if num_columns % group_size:
            raise ValueError(
                f"group size {group_size} does not divide the {num_columns} columns of a linear layer;"
                f" use {default_group_size(config)}"
            )


def quantize_rtn(
    weight: Tensor, kind: Kind, group_size: int | None = None, scale_type: torch.dtype | None = None
) -> QuantizedTensor:
    """Each weight to its nearest code, without offsets; the largest of a group has the largest code.

    weight: [num_rows, num_columns] of any floating type. group_size None: one scale a row. scale_type: what scales are
    rounded to; None: float16 for int4, else float32. Raises ValueError where groups don't divide the columns.
    """
    num_columns = weight.shape[1]
    size = num_columns if group_size is None else group_size
    if size < 1 or num_columns % size:
        raise ValueError(f"group size {size} does not divide {num_columns} columns; use one that does")
    slices = [range_scales(weight[rows].float(), kind, size, scale_type) for rows in row_slices(weight)]
    return quantize_with(weight, torch.cat(slices), kind)


def range_scales(weight: Tensor, kind: Kind, group_size: int, scale_type: torch.dtype | None) -> Tensor:
    """Scales at which the largest weight of each group has the largest code: [num_rows, num_groups] float32."""
    largest = weight.view(len(weight), -1, group_size).abs().amax(2)
    return round_scales(largest / MAX_CODES[kind], kind, scale_type)


def error_scales(
    weight: Tensor, kind: Kind, group_size: int, gram: Tensor, scale_type: torch.dtype | None
) -> Tensor:
    """The scale of each group, among some that cut large weights off, whose rounding changes the output least.

    weight: [num_rows, num_columns] float32; gram: [num_columns, num_columns], the mean of x x^T over inputs x; what a
    group's errors e add to the output's squared error is e^T gram e. Returns [num_rows, num_groups] float32.
    """
    starts = range(0, weight.shape[1], group_size)
    blocks = torch.stack([gram[i : i + group_size, i : i + group_size] for i in starts])  # [G, S, S]
    slices = [weight[rows].view(-1, len(starts), group_size) for rows in row_slices(weight)]
    return torch.cat([_error_scales(part.transpose(0, 1), kind, blocks, scale_type) for part in slices])


def _error_scales(
    groups: Tensor, kind: Kind, blocks: Tensor, scale_type: torch.dtype | None
) -> Tensor:  # groups: [G, N, S], blocks: [G, S, S]
    largest = groups.abs().amax(2)
    best = torch.full_like(largest, torch.inf)
    scales = torch.empty_like(largest)
    for step in _STEPS:
        found = round_scales(largest * (step / MAX_CODES[kind]), kind, scale_type)
        error = round_codes(groups / found[:, :, None], kind) * found[:, :, None] - groups
        loss = (torch.bmm(error, blocks) * error).sum(2)
        scales = torch.where(loss < best, found, scales)
        best = torch.minimum(best, loss)
    return scales.T.contiguous()


def row_slices(weight: Tensor) -> Iterator[slice]:
    """Slices of rows that keep the float32 numbers made from a weight few at a time."""
    step = max(1, _SLICE_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


def round_scales(scales: Tensor, kind: Kind, scale_type: torch.dtype | None) -> Tensor:
    """The scales as `scale_type` can hold them, in float32; where that is zero, 1: the codes are zero then."""
    if scale_type is None:
        scale_type = torch.float16 if kind == "int4" else torch.float32
    rounded = scales.to(scale_type).float()
    rounded = torch.where(torch.isfinite(rounded), rounded, scales)
    return torch.where(rounded > 0, rounded, 1.0)


def round_codes(values: Tensor, kind: Kind) -> Tensor:
    """Values in units of the scale as codes around zero, float32: rounded, and held within the codes there are."""
    if kind == "int4":
        return values.round().clamp_(-8, 7)
    if kind == "int8":
        return values.round().clamp_(-127, 127)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def quantize_with(weight: Tensor, scales: Tensor, kind: Kind) -> QuantizedTensor:
    """The nearest codes for scales [num_rows, num_groups] float32 of equal groups. weight: of any floating type."""
    num_columns, num_groups = weight.shape[1], scales.shape[1]
    codes = []
    for rows in row_slices(weight):
        groups = weight[rows].float().view(-1, num_groups, num_columns // num_groups)
        rounded = round_codes(groups / scales[rows, :, None], kind)
        codes.append(to_codes(rounded.view(-1, num_columns), kind))
    return build_tensor(torch.cat(codes), scales, kind)


def to_codes(rounded: Tensor, kind: Kind) -> Tensor:
    """What round_codes returned as QuantizedTensor holds it. rounded: [num_rows, num_columns] float32."""
    if kind == "int4":
        return pack_int4(rounded + INT4_ZERO)
    return rounded.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)


def build_tensor(codes: Tensor, scales: Tensor, kind: Kind) -> QuantizedTensor:
    """The tensor of codes and of scales [num_rows, num_groups] of equal groups."""
    narrow, _ = narrow_scales(scales.T.contiguous(), None)
    num_columns = codes.shape[1] * 2 if kind == "int4" else codes.shape[1]
    return QuantizedTensor(kind, codes, narrow, num_columns // scales.shape[1])


def _listed(numbers: Iterable[int]) -> str:
    first, *rest = map(str, numbers)
    return f"{', '.join([first, *rest[:-1]])} and {rest[-1]}" if rest else first
