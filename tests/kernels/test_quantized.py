"""The canonical quantized tensor, by literal codes and numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gristmill.kernels.quantized import (
    Kind,
    QuantizedTensor,
    concatenate,
    narrow_scales,
    pack_int4,
    unpack_codes,
)
from tests.kernels.codes import random_quantized

KINDS: tuple[Kind, ...] = ("int4", "int8", "fp8")


def table(*rows: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def test_int4_codes_are_halves_of_bytes_and_8_is_zero() -> None:
    codes = torch.tensor([[0x80, 0xF7]], dtype=torch.uint8)  # 0, 8, 7, 15
    weight = QuantizedTensor("int4", codes, table([0.5], [2.0]), 2)
    assert weight.shape == (1, 4)
    assert weight.dequantize().tolist() == [[-4.0, 0.0, -2.0, 14.0]]


def test_with_offsets_an_int4_code_counts_from_zero() -> None:
    codes = torch.tensor([[0x80, 0xF7]], dtype=torch.uint8)
    weight = QuantizedTensor("int4", codes, table([0.5], [2.0]), 2, table([1.0], [-3.0]))
    assert weight.dequantize().tolist() == [[1.0, 5.0, 11.0, 27.0]]


def test_int8_codes_are_signed_and_the_last_group_may_be_shorter() -> None:
    codes = torch.tensor([[1, -2, 3], [-128, 127, 0]], dtype=torch.int8)
    weight = QuantizedTensor("int8", codes, table([1.0, 0.5], [10.0, 2.0]), 2)
    assert weight.dequantize().tolist() == [[1.0, -2.0, 30.0], [-64.0, 63.5, 0.0]]


def test_fp8_codes_are_e4m3() -> None:
    # 1, -448, the smallest subnormal 2^-9, the smallest normal number 2^-6
    codes = torch.tensor([[0x38, 0xFE, 0x01, 0x08]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = QuantizedTensor("fp8", codes, table([2.0]), 4)
    assert weight.dequantize().tolist() == [[2.0, -896.0, 2.0**-8, 2.0**-5]]


def test_columns_say_where_codes_belong() -> None:
    codes = torch.tensor([[10, 20, 30]], dtype=torch.int8)
    weight = QuantizedTensor("int8", codes, table([1.0], [2.0]), 2, columns=torch.tensor([2, 0, 1]))
    assert weight.dequantize().tolist() == [[20.0, 60.0, 10.0]]


def test_int4_codes_are_packed_and_unpacked() -> None:
    values = torch.arange(16).view(2, 8)
    assert pack_int4(values)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack_codes(pack_int4(values), "int4"), values.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_more", [False, True])
def test_rows_are_taken_with_their_scales(kind: Kind, has_more: bool) -> None:
    weight = random_quantized(kind, (5, 12), 8, has_offsets=has_more, has_columns=has_more)
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(weight.take_rows(rows).dequantize(), weight.dequantize()[rows])
    assert weight.take_rows(rows[:0]).shape == (0, 12)


def test_bytes_are_those_of_all_parts() -> None:
    half = torch.float16
    assert random_quantized("int4", (64, 64), 32, half, has_offsets=True).bits_per_weight == 5.0
    assert random_quantized("int8", (64, 64), 32, half).bits_per_weight == 8.5
    weight = random_quantized("fp8", (10, 256), 128, has_columns=True)
    assert weight.num_bytes == 10 * 256 + 10 * 2 * 4 + 256 * 8


def test_scales_are_narrowed_only_where_nothing_is_lost() -> None:
    exact, inexact, large = torch.tensor([[0.5]]), torch.tensor([[0.1]]), torch.tensor([[1e6]])
    assert narrow_scales(exact, None)[0].dtype == torch.float16
    scales, offsets = narrow_scales(exact, exact.double())
    assert offsets is not None and offsets.dtype == scales.dtype == torch.float16
    for other in (inexact, large):
        assert narrow_scales(other, None)[0].dtype == torch.float32
        scales, offsets = narrow_scales(exact, other)
        assert offsets is not None and offsets.dtype == scales.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_tensors_that_are_alike_become_one(kind: Kind, has_offsets: bool) -> None:
    parts = [random_quantized(kind, (n, 24), 16, has_offsets=has_offsets, seed=n) for n in (3, 1, 6)]
    one = concatenate(parts)
    assert one is not None
    assert torch.equal(one.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_the_wider_scales_win() -> None:
    parts = [random_quantized("int8", (3, 24), 16, dtype) for dtype in (torch.float16, torch.float32)]
    one = concatenate(parts)
    assert one is not None and one.scales.dtype == torch.float32
    assert torch.equal(one.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_tensors_that_differ_do_not_become_one() -> None:
    first = random_quantized("int4", (4, 32), 16)
    for other in (
        random_quantized("int8", (4, 32), 16),
        random_quantized("int4", (4, 32), 8),
        random_quantized("int4", (4, 48), 16),
        random_quantized("int4", (4, 32), 16, has_offsets=True),
        random_quantized("int4", (4, 32), 16, has_columns=True),
    ):
        assert concatenate([first, other]) is None
    ordered = [random_quantized("int4", (4, 32), 16, has_columns=True, seed=seed) for seed in (1, 1, 2)]
    assert concatenate(ordered[:2]) is not None
    assert concatenate(ordered[1:]) is None


def test_scales_of_another_shape_are_our_bug() -> None:
    codes = torch.zeros(2, 8, dtype=torch.int8)
    with pytest.raises(AssertionError, match="scales"):
        QuantizedTensor("int8", codes, torch.ones(2, 2), 8)
    with pytest.raises(AssertionError, match="int4 codes are torch.int8"):
        QuantizedTensor("int4", codes, torch.ones(1, 2), 16)
