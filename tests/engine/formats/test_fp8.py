"""FP8 weights beside the formula in float64, the package's decompression, and literal codes."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from torch import Tensor

from gristmill.engine.checkpoint.formats.fp8 import FP8Scheme, ScaleLayout
from gristmill.engine.errors import ModelRefused

BLOCKS = FP8Scheme("fp8", ScaleLayout(128, 128), "weight_scale_inv", "activation_scale")
MODELOPT = FP8Scheme("modelopt", ScaleLayout())
GOLDEN = {
    **{0x00: 0.0, 0x01: 2**-9, 0x07: 7 * 2**-9, 0x08: 2**-6, 0x30: 0.5, 0x38: 1.0, 0x3C: 1.5, 0x3F: 1.875},
    **{0x40: 2.0, 0x77: 240.0, 0x7E: 448.0, 0x80: -0.0, 0x81: -(2**-9), 0xB8: -1.0, 0xFE: -448.0},
}


def _codes(num_rows: int, num_columns: int) -> Tensor:
    """Every code but NaN, many times."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 254, (num_rows, num_columns), generator=generator)
    return (values + (values >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)


def _scales(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(num_rows, num_columns, generator=generator) * 0.01 + 1e-4).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(256, 384), (200, 300), (64, 128), (128, 64), (1, 1)])
def test_blocks_are_codes_times_the_scale_of_their_square(
    num_rows: int, num_columns: int, dtype: torch.dtype
) -> None:
    shape = (math.ceil(num_rows / 128), math.ceil(num_columns / 128))
    codes, scales = _codes(num_rows, num_columns), _scales(*shape, dtype)
    stored = BLOCKS.stored(num_rows, num_columns)
    assert stored["weight"].shape == (num_rows, num_columns) and stored["weight_scale_inv"].shape == shape
    found = BLOCKS.build("m", {"weight": codes, "weight_scale_inv": scales}).dequantize()
    rows, columns = torch.arange(num_rows) // 128, torch.arange(num_columns) // 128
    expected = codes.double() * scales.double()[rows][:, columns]
    torch.testing.assert_close(found, expected.float(), rtol=1e-7, atol=0)
    theirs = FP8BlockDequantizer(dtype=torch.float32)._create_dequantized_weight(codes, scales)
    assert torch.equal(found, theirs)


def test_codes_have_the_values_of_e4m3() -> None:
    codes = torch.tensor([list(GOLDEN)], dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = MODELOPT.build("m", {"weight": codes, "weight_scale": torch.tensor(0.5)})
    assert found.dequantize().tolist() == [[value * 0.5 for value in GOLDEN.values()]]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_is_of_the_whole_tensor(shape: tuple[int, ...]) -> None:
    codes = _codes(40, 72)
    tensors = {"weight": codes, "weight_scale": torch.full(shape, 0.0123), "input_scale": torch.tensor(3.0)}
    found = MODELOPT.build("m", tensors)
    assert torch.equal(found.dequantize(), codes.float() * 0.0123)
    assert found.scales.shape == (1, 40)
    assert MODELOPT.stored(40, 72)["weight_scale"].shape == ()
    assert MODELOPT.stored(40, 72)["input_scale"].is_optional


def test_scales_become_groups_of_the_canonical_tensor() -> None:
    tensors = {"weight": _codes(200, 300), "weight_scale_inv": _scales(2, 3, torch.float32)}
    found = BLOCKS.build("m", tensors)
    assert (found.kind, found.group_size, found.scales.shape) == ("fp8", 128, (3, 200))
    assert found.codes is tensors["weight"]
    assert torch.equal(found.scales[2, 128:], tensors["weight_scale_inv"][1, 2].expand(72))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_not_numbers_are_refused_by_name(code: int) -> None:
    codes = _codes(40, 72).view(torch.uint8).clone()
    codes[39, 71] = code
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}
    with pytest.raises(
        ModelRefused, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight holds codes that are NaN"
    ):
        MODELOPT.build("model.layers.0.mlp.up_proj", tensors)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scales_that_are_not_finite_are_refused_by_name(bad: float) -> None:
    scales = _scales(2, 3, torch.float32)
    scales[1, 1] = bad
    with pytest.raises(
        ModelRefused, match=r"tensor lm_head\.weight_scale_inv holds numbers that are not finite"
    ):
        BLOCKS.build("lm_head", {"weight": _codes(200, 300), "weight_scale_inv": scales})
