"""compressed-tensors weights beside the compressed-tensors package's own decompression, and literal words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.engine.checkpoint.formats.compressed import IntScheme, PackedScheme
from gristmill.engine.checkpoint.formats.fp8 import FP8Scheme, ScaleLayout
from gristmill.engine.checkpoint.formats.scheme import Scheme
from gristmill.engine.errors import ModelRefused
from tests.engine.formats.packers_compressed import build_scheme, compress, decompress

TYPE_NAMES = {
    **{torch.int32: "I32", torch.int64: "I64", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"},
    **{torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
}
ROW, TENSOR = ScaleLayout(1), ScaleLayout()
PER_ROW: dict[str, Any] = {"strategy": "channel"}
PER_TENSOR: dict[str, Any] = {"strategy": "tensor"}
GROUPS: dict[str, Any] = {"strategy": "group", "group_size": 32}
BLOCKS: dict[str, Any] = {"strategy": "block", "block_structure": [128, 128]}


def _weight(num_rows: int = 20, num_columns: int = 96, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator) * 0.05 + 0.01


def _check_stored(scheme: Scheme, tensors: dict[str, Tensor], num_rows: int, num_columns: int) -> None:
    """The package's tensors are those that the scheme announces."""
    stored = scheme.stored(num_rows, num_columns)
    assert set(tensors) == {name for name, one in stored.items() if not one.is_optional}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        assert (() if shape == (1,) else shape) == stored[name].shape, name
        assert TYPE_NAMES[tensor.dtype] in stored[name].types, name


CASES: list[tuple[str, dict[str, Any], Scheme]] = [
    ("pack-quantized", {"num_bits": 4, **GROUPS}, PackedScheme(4, ScaleLayout(1, 32))),
    ("pack-quantized", {"num_bits": 4, **PER_ROW}, PackedScheme(4, ROW)),
    (
        "pack-quantized",
        {"num_bits": 4, "symmetric": False, **GROUPS},
        PackedScheme(4, ScaleLayout(1, 32), False),
    ),
    ("pack-quantized", {"num_bits": 4, "symmetric": False, **PER_ROW}, PackedScheme(4, ROW, False)),
    ("pack-quantized", {"num_bits": 8, **GROUPS}, PackedScheme(8, ScaleLayout(1, 32))),
    ("pack-quantized", {"num_bits": 8, "symmetric": False, **PER_ROW}, PackedScheme(8, ROW, False)),
    ("int-quantized", {"num_bits": 8, **PER_ROW}, IntScheme(ROW)),
    ("int-quantized", {"num_bits": 8, **PER_TENSOR}, IntScheme(TENSOR)),
    ("int-quantized", {"num_bits": 4, **GROUPS}, IntScheme(ScaleLayout(1, 32))),
    ("int-quantized", {"num_bits": 8, "symmetric": False, **PER_ROW}, IntScheme(ROW, False)),
    ("naive-quantized", {"num_bits": 8, **PER_ROW}, IntScheme(ROW)),
    ("float-quantized", {"num_bits": 8, "type": "float", **PER_TENSOR}, FP8Scheme("ct", TENSOR)),
    ("float-quantized", {"num_bits": 8, "type": "float", **PER_ROW}, FP8Scheme("ct", ROW)),
    ("float-quantized", {"num_bits": 8, "type": "float", **GROUPS}, FP8Scheme("ct", ScaleLayout(1, 32))),
    ("float-quantized", {"num_bits": 8, "type": "float", **BLOCKS}, FP8Scheme("ct", ScaleLayout(128, 128))),
    ("naive-quantized", {"num_bits": 8, "type": "float", **PER_TENSOR}, FP8Scheme("ct", TENSOR)),
]


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("storage", "weights", "scheme"), CASES)
def test_a_weight_is_what_the_package_reads(
    storage: str, weights: dict[str, Any], scheme: Scheme, scale_dtype: torch.dtype
) -> None:
    shape = (200, 256) if weights["strategy"] == "block" else (20, 96)
    theirs = build_scheme(**weights)
    tensors = compress(_weight(*shape), storage, theirs, scale_dtype)
    _check_stored(scheme, tensors, *shape)
    found = scheme.build("m", tensors)
    expected = decompress(tensors, storage, theirs)
    assert found.shape == shape
    if scale_dtype == torch.float32:
        torch.testing.assert_close(found.dequantize(), expected, rtol=1e-6, atol=1e-7)
    else:  # codes times a scale of 11 bits are exact in float32, whatever the order of operations
        assert torch.equal(found.dequantize(), expected)


@pytest.mark.parametrize("num_columns", [90, 92, 6])
def test_columns_that_do_not_fill_the_last_word_are_read(num_columns: int) -> None:
    theirs = build_scheme(num_bits=4, symmetric=False, **PER_ROW)
    tensors = compress(_weight(13, num_columns), "pack-quantized", theirs, torch.float16)
    scheme = PackedScheme(4, ROW, False)
    _check_stored(scheme, tensors, 13, num_columns)
    found = scheme.build("m", tensors).dequantize()
    assert torch.equal(found, decompress(tensors, "pack-quantized", theirs))


def test_int4_words_have_their_first_code_in_the_lowest_bits() -> None:
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    tensors = {
        "weight_packed": words,
        "weight_scale": torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16),
        "weight_shape": torch.tensor([1, 16]),
    }
    found = PackedScheme(4, ScaleLayout(1, 8)).build("m", tensors)
    assert found.codes.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert found.dequantize().tolist() == [
        [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    ]


def test_int4_zero_points_are_packed_along_the_rows() -> None:
    tensors = {
        "weight_packed": torch.tensor([[0x00000093], [0x00000093]], dtype=torch.int32),
        "weight_scale": torch.tensor([[1.0], [0.25]]),
        "weight_zero_point": torch.tensor([[0x000000A2]], dtype=torch.int32),  # 2 for row 0, 10 for row 1
        "weight_shape": torch.tensor([2, 2]),
    }
    found = PackedScheme(4, ROW, is_symmetric=False).build("m", tensors).dequantize()
    assert found.tolist() == [[3 - 2, 9 - 2], [(3 - 10) / 4, (9 - 10) / 4]]


def test_int8_words_hold_bytes_with_128_added() -> None:
    tensors = {
        "weight_packed": torch.tensor([[0x7F80FF00]], dtype=torch.int32),
        "weight_scale": torch.tensor([[2.0]]),
        "weight_shape": torch.tensor([1, 4]),
    }
    assert PackedScheme(8, ROW).build("m", tensors).dequantize().tolist() == [[-256.0, 254.0, 0.0, -2.0]]


@pytest.mark.parametrize("num_bits", [4, 8])
def test_columns_in_another_order_take_the_scales_of_their_own_groups(num_bits: int) -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))  # sorted place -> column
    groups = torch.empty(96, dtype=torch.int32)
    groups[order] = (torch.arange(96) // 32).int()
    theirs = build_scheme(num_bits=num_bits, symmetric=False, **GROUPS)
    sorted_tensors = compress(_weight()[:, order], "pack-quantized", theirs, torch.float16)
    expected = torch.empty(20, 96)
    expected[:, order] = decompress(sorted_tensors, "pack-quantized", theirs)

    shift = torch.arange(0, 32, num_bits)
    values = (sorted_tensors["weight_packed"].long()[:, :, None] >> shift & (1 << num_bits) - 1).view(20, 96)
    own = torch.empty_like(values)
    own[:, order] = values
    words = (own.view(20, -1, 32 // num_bits) << shift).sum(2)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    tensors = sorted_tensors | {"weight_packed": packed, "weight_g_idx": groups}
    scheme = PackedScheme(num_bits, ScaleLayout(1, 32), False, has_order=True)
    _check_stored(scheme, tensors, 20, 96)
    found = scheme.build("m", tensors)
    assert found.columns is not None
    assert torch.equal(found.dequantize(), expected)


@pytest.mark.parametrize("groups", [torch.full((96,), -1), torch.arange(96) // 32], ids=["unset", "in order"])
def test_an_order_that_changes_nothing_is_dropped(groups: Tensor) -> None:
    theirs = build_scheme(num_bits=4, **GROUPS)
    tensors = compress(_weight(), "pack-quantized", theirs, torch.float16)
    found = PackedScheme(4, ScaleLayout(1, 32), True, True).build(
        "m", tensors | {"weight_g_idx": groups.int()}
    )
    assert found.columns is None
    assert torch.equal(found.dequantize(), decompress(tensors, "pack-quantized", theirs))


def test_int4_takes_little_more_than_four_bits_a_weight() -> None:
    theirs = build_scheme(num_bits=4, strategy="group", group_size=128)
    tensors = compress(_weight(64, 512), "pack-quantized", theirs, torch.bfloat16)
    found = PackedScheme(4, ScaleLayout(1, 128)).build("m", tensors)
    assert found.bits_per_weight == 4 + 16 / 128  # scales fit float16


def _refusal(scheme: Scheme, tensors: dict[str, Tensor]) -> str:
    with pytest.raises(ModelRefused) as caught:
        scheme.build("model.layers.3.mlp.up_proj", tensors)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bad_tensors_are_refused_by_their_names() -> None:
    scheme = PackedScheme(4, ScaleLayout(1, 32), has_order=True)
    order = {"weight_g_idx": (torch.arange(96) // 32).int()}
    good = compress(_weight(), "pack-quantized", build_scheme(num_bits=4, **GROUPS), torch.float32) | order
    scheme.build("m", good)

    scales = good["weight_scale"].clone()
    scales[3, 1] = torch.nan
    text = _refusal(scheme, good | {"weight_scale": scales})
    assert "model.layers.3.mlp.up_proj.weight_scale" in text and "not finite" in text

    for shape in ([96, 20], [20, 104], [20, 88], [0, 0], [20, -8]):
        text = _refusal(scheme, good | {"weight_shape": torch.tensor(shape)})
        assert "model.layers.3.mlp.up_proj.weight_shape" in text and str(shape) in text

    for groups in (torch.zeros(96), torch.arange(96) // 24, torch.arange(96) // 32 - 1):
        text = _refusal(scheme, good | {"weight_g_idx": groups.int()})
        assert "model.layers.3.mlp.up_proj.weight_g_idx" in text

    int8 = compress(_weight(), "int-quantized", build_scheme(num_bits=8, **PER_ROW), torch.float32)
    int8["weight_scale"][2] = torch.inf
    assert "up_proj.weight_scale" in _refusal(IntScheme(ROW), int8)


@pytest.mark.parametrize("scheme", [PackedScheme(4, ScaleLayout(1, 128)), IntScheme(ScaleLayout(1, 128))])
def test_groups_that_do_not_divide_the_columns_are_refused(scheme: Scheme) -> None:
    with pytest.raises(ValueError, match="group size 128 does not divide its 576 columns"):
        scheme.stored(64, 576)


def test_int4_of_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="even number of columns, not 7"):
        PackedScheme(4, ROW).stored(8, 7)
