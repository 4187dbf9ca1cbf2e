"""Random quantized tensors for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernels.quantized import Kind, QuantizedTensor, pack_int4


def random_codes(kind: Kind, num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    """Every code that is a number is as likely."""
    if kind == "int4":
        return pack_int4(torch.randint(0, 16, (num_rows, num_columns), generator=generator))
    codes = torch.randint(0, 256, (num_rows, num_columns), generator=generator).to(torch.uint8)
    if kind == "int8":
        return codes.view(torch.int8)
    codes[codes & 127 == 127] = 0  # not a number
    return codes.view(torch.float8_e4m3fn)


def random_quantized(
    kind: Kind,
    shape: tuple[int, int],
    group_size: int,
    dtype: torch.dtype = torch.float32,
    has_offsets: bool = False,
    has_columns: bool = False,
    seed: int = 0,
) -> QuantizedTensor:
    """Weights of about 1 in size. group_size: more than the columns are cut to them."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = shape
    group_size = min(group_size, num_columns)
    table = (-(-num_columns // group_size), num_rows)
    largest = {"int4": 8, "int8": 128, "fp8": 448}[kind]
    scales = ((torch.rand(table, generator=generator) + 0.5) / largest).to(dtype)
    offsets = torch.randn(table, generator=generator).to(dtype) if has_offsets else None
    columns = torch.randperm(num_columns, generator=generator) if has_columns else None
    codes = random_codes(kind, num_rows, num_columns, generator)
    return QuantizedTensor(kind, codes, scales, group_size, offsets, columns)
