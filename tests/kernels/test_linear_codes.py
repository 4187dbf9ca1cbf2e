"""Linear layers over codes beside float64 products of the dequantized weights, at 8 lanes and at 16."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels import linear
from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.library import CpuKernels, load_library
from gristmill.kernels.cpu.linear import PanelLinear
from gristmill.kernels.cpu.linear_codes import CodesLinear
from gristmill.kernels.linear import GatedLinear, Linear, Weight
from gristmill.kernels.quantized import Kind, QuantizedTensor
from tests.kernels.codes import random_quantized

KINDS: tuple[Kind, ...] = ("int4", "int8", "fp8")
WHOLE_ROW = 10**6
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 40)


@pytest.fixture(scope="module", params=["avx2", "16 lanes, emulated"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    if request.param == "avx2":
        return CpuKernels("avx2", load_library("avx2"))
    return CpuKernels("avx2", load_library("amx", emulate=True))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_product(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The error is small beside the sum of the products' sizes, which float32 sums can't do without."""
    weight = weight.double()
    expected = functional.linear(x.double(), weight, None if bias is None else bias.double())
    limit = 3e-6 * (x.double().abs() @ weight.abs().T + 1e-3)
    assert actual.shape == expected.shape and ((actual - expected).abs() <= limit).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [8, 32, 64, 128, WHOLE_ROW], ids=str)
def test_any_number_of_rows_groups_and_features_is_multiplied(
    kernels: CpuKernels, kind: Kind, group_size: int
) -> None:
    for number, (out, size) in enumerate([(1, 2), (16, 8), (17, 20), (33, 64), (57, 300), (96, 576)]):
        dtype = torch.float16 if number % 2 else torch.float32
        for has_offsets in (False, True):
            weight = random_quantized(kind, (out, size), group_size, dtype, has_offsets, seed=number)
            layer, values = Linear(weight, kernels=kernels), weight.dequantize()
            assert layer.any_rows and isinstance(layer.runners[0], CodesLinear)
            for rows in ROWS:
                x = random(rows, size, seed=rows)
                assert_product(layer(x), x, values)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_take_odd_columns_and_groups(kernels: CpuKernels, kind: Kind) -> None:
    for size, group_size in ((1, 1), (5, 3), (31, 7), (577, 33), (515, WHOLE_ROW)):
        weight = random_quantized(kind, (19, size), group_size, torch.float16, has_offsets=size == 31)
        for rows in (1, 3, 8):
            x = random(rows, size, seed=rows)
            assert_product(Linear(weight, kernels=kernels)(x), x, weight.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_does_not_depend_on_the_other_rows(kernels: CpuKernels, kind: Kind) -> None:
    layer = Linear(random_quantized(kind, (150, 576), 32, torch.float16, has_offsets=True), kernels=kernels)
    x = random(300, 576, seed=1)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 5, 6, 8, 64, 256):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_codes_give_the_bits_of_the_float32_weights_they_stand_for(
    kernels: CpuKernels, kind: Kind, has_offsets: bool
) -> None:
    for group_size in (8, 32, 40, WHOLE_ROW):
        weight = random_quantized(kind, (57, 300), group_size, torch.float16, has_offsets)
        codes, floats = Linear(weight, kernels=kernels), Linear(weight.dequantize(), kernels=kernels)
        assert isinstance(codes.runners[0], CodesLinear) and isinstance(floats.runners[0], PanelLinear)
        assert torch.equal(codes.take_rows(torch.arange(57)), weight.dequantize())
        for rows in (1, 2, 3, 6, 7, 40, 200):
            x = random(rows, 300, seed=rows)
            assert torch.equal(codes(x), floats(x))


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_are_multiplied(kernels: CpuKernels, kind: Kind) -> None:
    weight, x = random_quantized(kind, (40, 128), 64), random(1024, 128)
    assert_product(Linear(weight, kernels=kernels)(x), x, weight.dequantize())


def test_every_code_is_exact(kernels: CpuKernels) -> None:
    bytes_ = torch.arange(256).to(torch.uint8)
    fp8 = bytes_[bytes_ & 127 != 127].view(torch.float8_e4m3fn)  # the others are not numbers
    int4 = bytes_[:16].view(-1, 1) * 17  # each code in both halves
    codes_of: dict[Kind, Tensor] = {
        "int4": int4,
        "int8": bytes_.view(torch.int8)[:, None],
        "fp8": fp8[:, None],
    }
    for kind, codes in codes_of.items():
        scales = torch.ones(1, len(codes))
        weight = QuantizedTensor(kind, codes, scales, 2 if kind == "int4" else 1)
        layer = Linear(weight, kernels=kernels)
        expected = weight.dequantize()
        for k in range(weight.shape[1]):
            one_hot = functional.one_hot(torch.tensor([k]), weight.shape[1]).float()
            assert torch.equal(layer(one_hot)[0], expected[:, k])
            assert torch.equal(layer(one_hot.repeat(7, 1))[6], expected[:, k])
        assert torch.equal(layer.take_rows(torch.arange(len(codes))), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_columns_in_another_order_meet_their_inputs(
    kernels: CpuKernels, kind: Kind, has_offsets: bool
) -> None:
    weight = random_quantized(kind, (40, 96), 32, has_offsets=has_offsets, has_columns=True)
    layer = Linear(weight, kernels=kernels)
    for rows in (1, 9):
        x = random(rows, 96, seed=rows)
        assert_product(layer(x), x, weight.dequantize())
    ids = torch.tensor([39, 0, 7])
    torch.testing.assert_close(layer.take_rows(ids), weight.dequantize()[ids], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_epilogues_follow_the_product(kernels: CpuKernels, kind: Kind, has_bias: bool) -> None:
    weight = random_quantized(kind, (43, 64), 32)
    bias = random(43, seed=2) if has_bias else None
    layer = Linear(weight, bias, kernels)
    for rows in (1, 5, 40):
        x, y = random(rows, 64, seed=3), random(rows, 43, seed=4)
        plain = layer(x)
        assert_product(plain, x, weight.dequantize(), bias)
        torch.testing.assert_close(layer.silu(x), functional.silu(plain))
        torch.testing.assert_close(layer.mul(x, y), plain * y)
        torch.testing.assert_close(layer.add(x, y), plain + y)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_pair_is_one_product(kernels: CpuKernels, kind: Kind, has_bias: bool) -> None:
    gate, up = (random_quantized(kind, (37, 64), 32, has_columns=True, seed=1) for _ in range(2))
    up = QuantizedTensor(kind, up.codes.flip(0), up.scales.half(), 32, columns=up.columns)
    biases = [random(37, seed=seed) if has_bias else None for seed in (5, 6)]
    gated = GatedLinear(gate, up, biases[0], biases[1], kernels)
    assert len(gated.runners) == 1 and gated.any_rows
    for rows in (1, 7, 40):
        x = random(rows, 64, seed=3)
        factors = [
            functional.linear(x, part.dequantize(), bias)
            for part, bias in zip((gate, up), biases, strict=True)
        ]
        torch.testing.assert_close(gated(x), functional.silu(factors[0]) * factors[1], rtol=1e-4, atol=1e-4)


def test_a_gated_pair_of_two_kinds_is_two_products(kernels: CpuKernels) -> None:
    gate, up, bias = (
        random_quantized("int4", (37, 64), 32),
        random_quantized("int8", (37, 64), 32),
        random(37),
    )
    x = random(7, 64, seed=3)
    expected = functional.silu(functional.linear(x, gate.dequantize(), bias)) * (x @ up.dequantize().T)
    gated = GatedLinear(gate, up, bias, kernels=kernels)
    assert gated.runners == ()
    torch.testing.assert_close(gated(x), expected, rtol=1e-4, atol=1e-4)
    gated = GatedLinear(gate, up.dequantize(), bias, kernels=kernels)
    torch.testing.assert_close(gated(x), expected, rtol=1e-4, atol=1e-4)


def test_parts_of_several_kinds_are_one_linear(kernels: CpuKernels) -> None:
    parts: list[Weight] = [
        random_quantized("int4", (24, 64), 32, torch.float16, seed=1),
        random_quantized("int4", (13, 64), 32, torch.float32, seed=2),
        random_quantized("int8", (16, 64), 32, seed=3),
        random(9, 64, seed=4),
        random(2, 64, seed=5),
    ]
    values = torch.cat([part if isinstance(part, Tensor) else part.dequantize() for part in parts])
    bias = random(64, seed=6)
    layer = Linear(parts, bias, kernels)
    assert (layer.out_features, layer.in_features, layer.num_weights) == (64, 64, 4096)
    assert [type(runner) for runner in layer.runners] == [CodesLinear, CodesLinear, PanelLinear]
    assert layer.any_rows and not layer.has_rows
    for rows in (1, 11):
        x, y = random(rows, 64, seed=7), random(rows, 64, seed=8)
        assert_product(layer(x), x, values, bias)
        plain = functional.linear(x, values, bias)
        torch.testing.assert_close(layer.silu(x), functional.silu(plain), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.mul(x, y), plain * y, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.add(x, y), plain + y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_head_are_its_embeddings(kernels: CpuKernels, kind: Kind) -> None:
    weight = random_quantized(kind, (70, 72), 32, torch.float16, has_offsets=True)
    layer, ids = Linear(weight, kernels=kernels), torch.tensor([0, 69, 31, 32, 31])
    assert layer.has_rows
    torch.testing.assert_close(layer.take_rows(ids), weight.dequantize()[ids], rtol=1e-6, atol=1e-6)
    assert layer.take_rows(ids[:0]).shape == (0, 72)
    with pytest.raises(AssertionError, match="beyond"):
        layer.take_rows(torch.tensor([70]))


def test_rows_may_lie_apart_and_columns_too(kernels: CpuKernels) -> None:
    weight = random_quantized("int4", (24, 40), 8)
    layer, wide = Linear(weight, kernels=kernels), random(9, 100, seed=1)
    expected = layer(wide[:, 3:43].contiguous())
    assert torch.equal(layer(wide[:, 3:43]), expected)
    assert torch.equal(layer(wide[:, 3:43].T.contiguous().T), expected)
    other = random(9, 60, seed=2)[:, 7:31]
    torch.testing.assert_close(layer.add(wide[:, 3:43], other), expected + other)


def test_threads_change_nothing(kernels: CpuKernels) -> None:
    layer = Linear(random_quantized("int4", (300, 64), 32), kernels=kernels)
    x, num_threads = random(100, 64, seed=1), torch.get_num_threads()
    expected = layer(x)
    try:
        for n in (1, 3, 8):
            torch.set_num_threads(n)
            assert torch.equal(layer(x), expected) and torch.equal(layer(x[:1]), expected[:1])
    finally:
        torch.set_num_threads(num_threads)


def test_bytes_are_those_of_the_codes(kernels: CpuKernels) -> None:
    shape, half = (576, 576), torch.float16
    asymmetric = random_quantized("int4", shape, 32, half, has_offsets=True)
    assert Linear(asymmetric, kernels=kernels).bits_per_weight == 5.0
    assert Linear(random_quantized("int8", shape, 32, half), kernels=kernels).bits_per_weight == 8.5
    assert GatedLinear(asymmetric, asymmetric, kernels=kernels).bits_per_weight == 5.0
    assert Linear(random(32, 64), kernels=kernels).bits_per_weight == 32
    assert Linear(random(32, 64)).num_bytes == 4 * 32 * 64


def test_bfloat16_activations_are_taken_and_given_back(kernels: CpuKernels) -> None:
    weight, x = random_quantized("int8", (32, 64), 32), random(5, 64, seed=1).bfloat16()
    y = Linear(weight, kernels=kernels)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, (x.float() @ weight.dequantize().T).bfloat16(), rtol=2e-2, atol=1e-2)


def test_groups_that_split_a_lane_are_dequantized_and_the_log_says_so(
    kernels: CpuKernels, caplog: pytest.LogCaptureFixture
) -> None:
    linear._say_dequantized.cache_clear()
    weight, x = random_quantized("int4", (20, 36), 12), random(3, 36)
    for _ in range(2):
        layer = Linear(weight, kernels=kernels)
        assert isinstance(layer.runners[0], PanelLinear) and not layer.has_rows
        assert_product(layer(x), x, weight.dequantize())
    gated = GatedLinear(weight, weight, kernels=kernels)
    expected = functional.silu(layer(x)) * layer(x)
    torch.testing.assert_close(gated(x), expected)
    assert len(caplog.messages) == 1 and "multiple of 8 columns, not 12" in caplog.messages[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_kernels_weights_are_dequantized(
    kind: Kind, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    linear._say_dequantized.cache_clear()
    caplog.set_level(logging.INFO)
    weight, up = random_quantized(kind, (48, 40), 8), random_quantized(kind, (48, 40), 8, seed=1)
    bias, x, y = random(48, seed=2), random(5, 40, seed=3).to(dtype), random(5, 48, seed=4).to(dtype)
    layer, gated = Linear([weight, up], torch.cat([bias, bias])), GatedLinear(weight, up)
    plain = functional.linear(x.float(), weight.dequantize(), bias)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for actual, expected in (
        (layer(x)[:, :48], plain),
        (layer.silu(x)[:, :48], functional.silu(plain)),
        (layer.mul(x, torch.cat([y, y], 1))[:, :48], plain * y),
        (layer.add(x, torch.cat([y, y], 1))[:, :48], plain + y),
        (gated(x), functional.silu(plain - bias) * (x.float() @ up.dequantize().T)),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)
    assert layer.num_bytes == 2 * 48 * 40 * 4 and not layer.has_rows
    assert len(caplog.messages) == 1 and "no C++ kernels" in caplog.messages[0]


def test_without_kernels_parts_may_be_of_several_kinds() -> None:
    parts: list[Weight] = [
        random_quantized("int4", (24, 64), 32),
        random_quantized("int8", (16, 64), 32),
        random(8, 64),
    ]
    values = torch.cat([part if isinstance(part, Tensor) else part.dequantize() for part in parts])
    layer, x, y = Linear(parts), random(5, 64, seed=1), random(5, 48, seed=2)
    torch.testing.assert_close(layer(x), x @ values.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.mul(x, y), (x @ values.T) * y, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.add(x, y), x @ values.T + y, rtol=1e-4, atol=1e-4)
