"""The canonical quantized tensor: every checkpoint format is turned into it, and every kernel reads it.

A weight is code * scale + offset, with one scale (and offset) for each row and each group of neighbouring columns. A
scale per tensor, per row or per block of 128 x 128 is a group of that width whose scales repeat over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "fp8"]
CODE_TYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
INT4_ZERO = 8  # the code of 0 where an int4 tensor has no offsets


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight matrix W [num_rows, num_columns] in codes.

    int4: codes uint8 [num_rows, num_columns / 2], the even column in the low half of the byte, codes 0 to 15;
    int8: codes int8 [num_rows, num_columns]; fp8: codes float8_e4m3fn [num_rows, num_columns].
    scales, offsets: [num_groups, num_rows] float16 or float32, both of one type; group j is the columns from
    j * group_size on, the last group may be shorter. Without offsets W = code * scale, for int4 (code - 8) * scale.
    columns: [num_columns] int64, which column of W the codes' column j is; None: they are in order.
    """

    kind: Kind
    codes: Tensor
    scales: Tensor
    group_size: int
    offsets: Tensor | None = None
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, num_columns = self.shape
        assert self.codes.dtype == CODE_TYPES[self.kind], f"{self.kind} codes are {self.codes.dtype}"
        assert self.group_size >= 1 and num_columns >= 1
        expected = (-(-num_columns // self.group_size), num_rows)
        assert self.scales.shape == expected, f"scales {tuple(self.scales.shape)}, expected {expected}"
        assert self.scales.dtype in (torch.float16, torch.float32), self.scales.dtype
        if self.offsets is not None:
            assert self.offsets.shape == expected and self.offsets.dtype == self.scales.dtype
        if self.columns is not None:
            assert self.columns.shape == (num_columns,) and self.columns.dtype == torch.int64

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_columns) of W."""
        num_rows, width = self.codes.shape
        return num_rows, width * 2 if self.kind == "int4" else width

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales, offsets and column order."""
        parts = (self.codes, self.scales, self.offsets, self.columns)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def bits_per_weight(self) -> float:
        """num_bytes in bits, over the weights."""
        num_rows, num_columns = self.shape
        return 8 * self.num_bytes / (num_rows * num_columns)

    def take_rows(self, rows: Tensor) -> QuantizedTensor:
        """The rows of these indices. rows: [n] int64."""
        offsets = None if self.offsets is None else self.offsets[:, rows]
        return QuantizedTensor(
            self.kind, self.codes[rows], self.scales[:, rows], self.group_size, offsets, self.columns
        )

    def dequantize(self) -> Tensor:
        """W: [num_rows, num_columns] float32, its columns in order."""
        num_columns = self.shape[1]
        group = torch.arange(num_columns) // self.group_size
        weight = unpack_codes(self.codes, self.kind)
        if self.kind == "int4" and self.offsets is None:
            weight -= INT4_ZERO
        weight *= self.scales.float().T[:, group]
        if self.offsets is not None:
            weight += self.offsets.float().T[:, group]
        if self.columns is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.columns] = weight
        return ordered


Weight = Tensor | QuantizedTensor


def unpack_codes(codes: Tensor, kind: Kind) -> Tensor:
    """Codes as numbers: [num_rows, num_columns] float32."""
    if kind != "int4":
        return codes.float()
    return torch.stack([codes & 15, codes >> 4], 2).view(len(codes), -1).float()


def pack_int4(values: Tensor) -> Tensor:
    """Codes 0 to 15, [num_rows, num_columns] of any integer type, as uint8 [num_rows, num_columns / 2]."""
    pairs = values.to(torch.uint8).view(len(values), -1, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 4


def narrow_scales(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both as float16 where that loses nothing, else as float32. scales, offsets: any floating type."""
    parts = [part for part in (scales, offsets) if part is not None]
    exact = all(
        torch.equal(part.to(torch.float16).to(torch.float64), part.to(torch.float64)) for part in parts
    )
    dtype = torch.float16 if exact else torch.float32
    return scales.to(dtype), None if offsets is None else offsets.to(dtype)


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """One tensor of all rows; None where the parts differ in kind, groups, offsets or column order."""
    first = parts[0]
    for part in parts[1:]:
        alike = part.kind == first.kind and part.group_size == first.group_size
        alike = (
            alike and part.shape[1] == first.shape[1] and (part.offsets is None) == (first.offsets is None)
        )
        if not alike or not _same_columns(part.columns, first.columns):
            return None
    dtype = max((part.scales.dtype for part in parts), key=lambda found: found.itemsize)
    offsets = [part.offsets.to(dtype) for part in parts if part.offsets is not None]
    return QuantizedTensor(
        first.kind,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales.to(dtype) for part in parts], 1),
        first.group_size,
        torch.cat(offsets, 1) if offsets else None,
        first.columns,
    )


def join_neighbours(weights: Sequence[Weight]) -> list[Weight]:
    """The same rows in as few parts as their kinds allow."""
    groups: list[list[Weight]] = []
    for weight in weights:
        if groups and are_alike(groups[-1][0], weight):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def are_alike(a: Weight, b: Weight) -> bool:
    """Whether their rows can stand in one weight."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    no_rows = torch.empty(0, dtype=torch.int64)
    return concatenate([a.take_rows(no_rows), b.take_rows(no_rows)]) is not None


def _join(weights: Sequence[Weight]) -> Weight:
    """One weight of all rows of weights that are alike."""
    if isinstance(weights[0], Tensor):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    joined = concatenate([weight for weight in weights if isinstance(weight, QuantizedTensor)])
    assert joined is not None
    return joined


def _same_columns(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
