"""Rounding to nearest: codes, scales and groups, against the formula written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gristmill.engine.config import ModelConfig
from gristmill.engine.quantize import rtn
from gristmill.engine.quantize.rtn import (
    check_groups,
    default_group_size,
    error_scales,
    quantize_rtn,
    quantize_with,
    range_scales,
)
from gristmill.kernels.quantized import Kind, unpack_codes

CONFIG = ModelConfig("llama", 400, 576, 1536, 2, 9, 3, 64, 256, 1e-5, 1e4)


def _weight(num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))


def test_an_int4_code_is_the_nearest_in_units_of_its_groups_scale() -> None:
    weight = _weight(3, 64)
    found = quantize_rtn(weight, "int4", 32)
    assert (found.kind, found.group_size, found.offsets, found.columns) == ("int4", 32, None, None)
    codes = unpack_codes(found.codes, "int4")
    for row in range(3):
        for group in range(2):
            part = slice(32 * group, 32 * group + 32)
            scale = (weight[row, part].abs().max() / 7.5).half().float()
            assert found.scales[group, row] == scale
            expected = torch.clamp(torch.round(weight[row, part] / scale), -8, 7) + 8
            assert torch.equal(codes[row, part], expected)


@pytest.mark.parametrize(("kind", "most"), [("int4", 0.07), ("int8", 0.004), ("fp8", 0.0358)])
def test_the_error_is_at_most_half_a_step(kind: Kind, most: float) -> None:
    weight = _weight(5, 96)
    found = quantize_rtn(weight, kind, 32 if kind == "int4" else None)
    groups = weight.view(5, -1, 32 if kind == "int4" else 96)
    error = (found.dequantize() - weight).view_as(groups).abs()
    assert (error / groups.abs().amax(2, keepdim=True)).max() <= most


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_row_has_one_scale_and_its_largest_weight_the_largest_code(kind: Kind) -> None:
    weight = _weight(4, 40)
    found = quantize_rtn(weight, kind)
    assert found.scales.shape == (1, 4) and found.group_size == 40
    assert torch.equal(
        unpack_codes(found.codes, kind).abs().amax(1), torch.full((4,), 127.0 if kind == "int8" else 448.0)
    )


def test_fp8_saturates_where_its_scale_was_rounded_down() -> None:
    weight = torch.full((1, 16), 1.0)
    scales = torch.full((1, 1), 1 / 500)
    assert torch.equal(quantize_with(weight, scales, "fp8").dequantize(), torch.full((1, 16), 448 / 500))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_zeros_and_numbers_below_every_scale_stay_finite(kind: Kind) -> None:
    weight = torch.zeros(2, 32)
    weight[1] = 1e-30
    found = quantize_rtn(weight, kind, 32).dequantize()
    assert torch.isfinite(found).all() and found.abs().max() <= 1e-30


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_slices_of_rows_and_bfloat16_change_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(7, 64).bfloat16()
    whole = quantize_rtn(weight.float(), kind, 32)
    monkeypatch.setattr(rtn, "_SLICE_ELEMENTS", 128)
    sliced = quantize_rtn(weight, kind, 32)
    assert torch.equal(whole.dequantize(), sliced.dequantize())
    assert torch.equal(whole.scales, sliced.scales)


def test_scales_are_of_the_type_asked_for() -> None:
    found = quantize_rtn(_weight(3, 64), "int4", 64, torch.bfloat16)
    assert torch.equal(found.scales.bfloat16().float(), found.scales.float())


def test_scales_that_weigh_errors_lose_no_more_than_those_of_the_range() -> None:
    weight = _weight(6, 128)
    weight[:, ::17] *= 6
    inputs = _weight(500, 128, 1) * torch.linspace(0.1, 3, 128)
    gram = inputs.T @ inputs / 500
    losses = []
    for scales in (range_scales(weight, "int4", 64, None), error_scales(weight, "int4", 64, gram, None)):
        error = quantize_with(weight, scales, "int4").dequantize() - weight
        losses.append(sum(((e @ g) * e).sum() for e, g in _blocks(error, gram, 64)))
    assert losses[1] < 0.95 * losses[0]


def _blocks(error: torch.Tensor, gram: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (error[:, i : i + size], gram[i : i + size, i : i + size]) for i in range(0, error.shape[1], size)
    ]


def test_the_default_group_size_divides_every_linear() -> None:
    assert default_group_size(CONFIG) == 64  # 576 is 4.5 x 128
    assert default_group_size(replace(CONFIG, hidden_size=1024, num_heads=16)) == 128
    assert default_group_size(replace(CONFIG, intermediate_size=1568)) == 32
    with pytest.raises(ValueError, match="576 and 1500 columns.*int8 or fp8"):
        default_group_size(replace(CONFIG, intermediate_size=1500))


def test_a_group_size_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    check_groups(CONFIG, 96)
    with pytest.raises(ValueError, match="128 does not divide the 576 columns.*use 64"):
        check_groups(CONFIG, 128)
    with pytest.raises(ValueError, match="12 is not a multiple of 8"):
        check_groups(CONFIG, 12)
    with pytest.raises(ValueError, match="48 does not divide 64 columns"):
        quantize_rtn(_weight(2, 64), "int4", 48)
