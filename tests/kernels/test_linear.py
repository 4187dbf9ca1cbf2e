"""Linear layers of every kind of weight beside the reference: 8 lanes, 16 and torch, odd shapes, all finishes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels import reference
from gristmill.kernels.contract import Backend
from gristmill.kernels.cpu.backend import CpuBackend
from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.library import NO_CPU_KERNELS, CpuKernels, load_library
from gristmill.kernels.cpu.linear import PanelLinear, activation_dtype, has_panels
from gristmill.kernels.cpu.linear_codes import CodesLinear
from gristmill.kernels.linear import GatedPair
from gristmill.kernels.quantized import Kind, QuantizedTensor, Weight
from gristmill.kernels.torch import backend as torch_backend
from tests.kernels.codes import random_quantized

CODES: tuple[Kind, ...] = ("int4", "int8", "fp8")
KINDS = ("float32", "bfloat16", *CODES)
WHOLE_ROW = 10**6
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 40, 193)


@pytest.fixture(scope="module", params=["avx2", "16 lanes, emulated"])
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    # Floats are held in panels at level avx2 only; the library inside is what counts here.
    library = load_library("avx2") if request.param == "avx2" else load_library("amx", emulate=True)
    return CpuBackend(CpuKernels("avx2", library))


@pytest.fixture(scope="module", params=["avx2", "torch"])
def either(request: pytest.FixtureRequest) -> Backend:
    if request.param == "torch":
        return torch_backend.TorchBackend()
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    return CpuBackend(CpuKernels("avx2", load_library("avx2")))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_weight(
    kind: str, shape: tuple[int, int], group_size: int = 32, seed: int = 0, **settings: bool
) -> Weight:
    """Floats, or codes with float16 scales."""
    if kind in ("float32", "bfloat16"):
        return random(*shape, seed=seed, dtype=getattr(torch, kind))
    return random_quantized(kind, shape, group_size, torch.float16, seed=seed, **settings)  # type: ignore[arg-type]


def assert_product(actual: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """The error is small beside the sum of the products' sizes, which float32 sums can't do without."""
    values = reference.weight_values(weight)
    expected = reference.linear(x, values, bias)
    limit = 3e-6 * (x.double().abs() @ values.abs().T + 1e-3)
    assert actual.shape == expected.shape and ((actual - expected).abs() <= limit).all()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows_groups_and_features_is_multiplied(backend: CpuBackend, kind: str) -> None:
    shapes = ((1, 2), (16, 8), (17, 20), (33, 64), (57, 300), (96, 576))
    for number, shape in enumerate(shapes):
        for group_size in (8, 32, 128, WHOLE_ROW) if kind in CODES else (WHOLE_ROW,):
            weight = make_weight(kind, shape, group_size, number, has_offsets=number % 2 == 1)
            layer, values = backend.linear(weight), reference.weight_values(weight)
            held_as = CodesLinear if kind in CODES else PanelLinear
            assert layer.any_rows and isinstance(layer.parts[0], held_as)
            for rows in ROWS:
                x = random(rows, shape[1], seed=rows)
                assert_product(layer(x), x, values)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])
def test_odd_columns_and_groups_are_multiplied(backend: CpuBackend, kind: str) -> None:
    for size, group_size in ((1, 1), (5, 3), (31, 7), (577, 33), (515, WHOLE_ROW)):
        weight = make_weight(kind, (19, size), group_size, has_offsets=size == 31)
        for rows in (1, 3, 8):
            x = random(rows, size, seed=rows)
            assert_product(backend.linear(weight)(x), x, weight)


@pytest.mark.parametrize(
    "kind", ["float32", *CODES]
)  # the sums of bfloat16 weights depend on the number of rows
def test_a_product_depends_on_no_other_rows_and_no_threads(backend: CpuBackend, kind: str) -> None:
    layer, x = backend.linear(make_weight(kind, (150, 576), has_offsets=True)), random(300, 576, seed=1)
    whole, num_threads = layer(x), torch.get_num_threads()
    for rows in (1, 2, 3, 4, 5, 6, 8, 64, 256):
        assert torch.equal(layer(x[:rows]), whole[:rows]) and torch.equal(layer(x[-rows:]), whole[-rows:])
    try:
        for num in (1, 3, 8):
            torch.set_num_threads(num)
            assert torch.equal(layer(x), whole) and torch.equal(layer(x[:1]), whole[:1])
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_codes_give_the_bits_of_the_float32_weights_they_stand_for(
    backend: CpuBackend, kind: Kind, has_offsets: bool
) -> None:
    for group_size in (8, 32, 40, WHOLE_ROW):
        weight = random_quantized(kind, (57, 300), group_size, torch.float16, has_offsets)
        codes, floats = backend.linear(weight), backend.linear(weight.dequantize())
        assert isinstance(codes.parts[0], CodesLinear) and isinstance(floats.parts[0], PanelLinear)
        assert torch.equal(codes.take_rows(torch.arange(57)), weight.dequantize())
        for rows in (1, 2, 3, 6, 7, 40, 200):
            x = random(rows, 300, seed=rows)
            assert torch.equal(codes(x), floats(x))


def test_every_code_is_exact(backend: CpuBackend) -> None:
    bytes_ = torch.arange(256).to(torch.uint8)
    fp8 = bytes_[bytes_ & 127 != 127].view(torch.float8_e4m3fn)  # the others are not numbers
    int4 = bytes_[:16].view(-1, 1) * 17  # each code in both halves
    codes_of: dict[Kind, Tensor] = {
        "int4": int4,
        "int8": bytes_.view(torch.int8)[:, None],
        "fp8": fp8[:, None],
    }
    for kind, codes in codes_of.items():
        weight = QuantizedTensor(kind, codes, torch.ones(1, len(codes)), 2 if kind == "int4" else 1)
        layer, expected = backend.linear(weight), reference.weight_values(weight).float()
        assert torch.equal(weight.dequantize(), expected)
        for k in range(weight.shape[1]):
            one_hot = functional.one_hot(torch.tensor([k]), weight.shape[1]).float()
            assert torch.equal(layer(one_hot)[0], expected[:, k])
            assert torch.equal(layer(one_hot.repeat(7, 1))[6], expected[:, k])
        assert torch.equal(layer.take_rows(torch.arange(len(codes))), expected)


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("has_offsets", [False, True])
def test_columns_in_another_order_meet_their_inputs(
    backend: CpuBackend, kind: Kind, has_offsets: bool
) -> None:
    weight = make_weight(kind, (40, 96), has_offsets=has_offsets, has_columns=True)
    layer, ids = backend.linear(weight), torch.tensor([39, 0, 7])
    for rows in (1, 9):
        x = random(rows, 96, seed=rows)
        assert_product(layer(x), x, weight)
    assert_close(layer.take_rows(ids), reference.weight_values(weight)[ids], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_follows_the_product_is_fused_behind_it(backend: CpuBackend, kind: str, has_bias: bool) -> None:
    for shape in ((43, 64), (37, 32)):
        weight, bias = make_weight(kind, shape), random(shape[0], seed=2) if has_bias else None
        layer = backend.linear(weight, bias)
        for rows in (1, 5, 64):
            x, y = random(rows, shape[1], seed=3), random(rows, shape[0], seed=4)
            assert_product(layer(x), x, weight, bias)
            for finish, other in (("silu", None), ("mul", y), ("add", y)):
                assert_close(layer(x, finish, other), reference.linear(x, weight, bias, finish, other))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_pair_is_one_product(backend: CpuBackend, kind: str, has_bias: bool) -> None:
    gate, up = (make_weight(kind, (37, 64), seed=seed) for seed in (1, 2))
    biases = [random(37, seed=seed) if has_bias else None for seed in (5, 6)]
    gated = backend.gated_linear(gate, up, *biases)
    assert gated.any_rows and isinstance(gated.parts[0], PanelLinear | CodesLinear)
    for rows in (1, 7, 200):
        x = random(rows, 64, seed=3)
        assert_close(gated(x), reference.gated_linear(x, gate, up, *biases))


def test_a_gated_pair_of_two_kinds_is_two_products(backend: CpuBackend) -> None:
    gate, up, bias, x = (
        make_weight("int4", (37, 64)),
        make_weight("int8", (37, 64)),
        random(37),
        random(7, 64),
    )
    for other in (up, reference.weight_values(up).float()):
        gated = backend.gated_linear(gate, other, bias)
        assert isinstance(gated.parts[0], GatedPair)
        assert_close(gated(x), reference.gated_linear(x, gate, other, bias))


@pytest.mark.parametrize("scales", [torch.float16, torch.float32])
def test_parts_of_several_kinds_are_one_linear(either: Backend, scales: torch.dtype) -> None:
    parts: list[Weight] = [
        random_quantized("int4", (24, 64), 32, torch.float16, seed=1),
        random_quantized("int4", (13, 64), 32, scales, seed=2),
        random_quantized("int8", (16, 64), 32, seed=3),
        random(9, 64, seed=4),
        random(2, 64, seed=5),
    ]
    values, bias = torch.cat([reference.weight_values(part) for part in parts]), random(64, seed=6)
    layer = either.linear(parts, bias)
    assert (layer.out_features, layer.in_features, layer.num_weights) == (64, 64, 4096)
    assert len(layer.parts) == 3 and not layer.has_rows
    for rows in (1, 11):
        x, y = random(rows, 64, seed=7), random(rows, 64, seed=8)
        assert_product(layer(x), x, values, bias)
        for finish, other in (("silu", None), ("mul", y), ("add", y)):
            assert_close(layer(x, finish, other), reference.linear(x, values, bias, finish, other))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", CODES)
def test_rows_of_a_head_are_its_embeddings(backend: CpuBackend, kind: Kind) -> None:
    weight = random_quantized(kind, (70, 72), 32, torch.float16, has_offsets=True)
    layer, ids = backend.linear(weight), torch.tensor([0, 69, 31, 32, 31])
    assert layer.has_rows and layer.take_rows(ids[:0]).shape == (0, 72)
    assert_close(layer.take_rows(ids), reference.weight_values(weight)[ids], 1e-6)
    with pytest.raises(AssertionError, match="beyond"):
        layer.take_rows(torch.tensor([70]))


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_rows_may_lie_apart_and_columns_too(backend: CpuBackend, kind: str) -> None:
    layer, wide = backend.linear(make_weight(kind, (24, 40), 8)), random(9, 100, seed=1)
    expected = layer(wide[:, 3:43].contiguous())
    assert torch.equal(layer(wide[:, 3:43]), expected)
    assert torch.equal(layer(wide[:, 3:43].T.contiguous().T), expected)
    other = random(9, 60, seed=2)[:, 7:31]
    torch.testing.assert_close(layer(wide[:, 3:43], "add", other), expected + other)


def test_infinities_and_nan_arrive(backend: CpuBackend) -> None:
    x = torch.tensor([[1.0, 2.0], [float("inf"), 0.5], [float("nan"), 0.0], [-float("inf"), 1.0]])
    layer = backend.linear(torch.ones(3, 2))
    torch.testing.assert_close(layer(x), x.sum(1, keepdim=True).expand(4, 3), equal_nan=True)
    silu = layer(x[:3], "silu")
    assert silu[1].eq(float("inf")).all() and silu[2].isnan().all()
    assert layer(torch.full((1, 2), -200.0), "silu").abs().max() < 1e-30


@pytest.mark.parametrize("kind", KINDS[1:])
def test_bfloat16_activations_are_taken_and_given_back(either: Backend, kind: str) -> None:
    weight, x = make_weight(kind, (32, 64)), random(5, 64, seed=1, dtype=torch.bfloat16)
    y = either.linear(weight)(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, reference.linear(x, weight), 2e-2)


def test_bytes_are_those_of_the_codes(backend: CpuBackend) -> None:
    asymmetric = make_weight("int4", (576, 576), has_offsets=True)
    assert backend.linear(asymmetric).bits_per_weight == 5.0
    assert backend.linear(make_weight("int8", (576, 576))).bits_per_weight == 8.5
    assert backend.gated_linear(asymmetric, asymmetric).bits_per_weight == 5.0
    assert backend.linear(random(32, 64)).bits_per_weight == 32
    assert torch_backend.TorchBackend().linear(random(32, 64)).num_bytes == 4 * 32 * 64


def test_groups_that_split_a_lane_are_dequantized_and_the_log_says_so(
    backend: CpuBackend, caplog: pytest.LogCaptureFixture
) -> None:
    torch_backend._say_dequantized.cache_clear()
    weight, x = random_quantized("int4", (20, 36), 12), random(3, 36)
    for _ in range(2):
        layer = backend.linear(weight)
        assert isinstance(layer.parts[0], PanelLinear) and not layer.has_rows
        assert_product(layer(x), x, weight)
    assert_close(backend.gated_linear(weight, weight)(x), reference.gated_linear(x, weight, weight))
    assert len(caplog.messages) == 1 and "multiple of 8 columns, not 12" in caplog.messages[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_kernels_torch_gives_the_same_and_codes_are_dequantized(
    kind: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    if kind not in CODES:
        kind = str(dtype).removeprefix("torch.")
    torch_backend._say_dequantized.cache_clear()
    caplog.set_level(logging.INFO)
    backend, tolerance = torch_backend.TorchBackend(), 5e-2 if dtype == torch.bfloat16 else 1e-4
    weight, up = make_weight(kind, (48, 40), 8), make_weight(kind, (48, 40), 8, seed=1)
    bias = random(48, seed=2, dtype=torch.float32 if kind in CODES else dtype)
    layer, gated = backend.linear([weight, up], torch.cat([bias, bias])), backend.gated_linear(weight, up)
    for rows in (1, 5, 1100):
        x, y = random(rows, 40, seed=3, dtype=dtype), random(rows, 48, seed=4, dtype=dtype)
        for finish, other in (("plain", None), ("silu", None), ("mul", y), ("add", y)):
            actual = layer(x, finish, None if other is None else torch.cat([y, y], 1))[:, :48]  # type: ignore[arg-type]
            assert actual.dtype == dtype
            assert_close(actual, reference.linear(x, weight, bias, finish, other), tolerance)  # type: ignore[arg-type]
        assert_close(gated(x), reference.gated_linear(x, weight, up), tolerance)
    assert not layer.has_rows
    expected: Sequence[str] = ["there are no C++ kernels"] if kind in CODES else []
    assert [message.split(": ")[1] for message in caplog.messages] == expected


def test_the_level_decides_the_path() -> None:
    float32, bfloat16 = torch.float32, torch.bfloat16
    levels = {
        level: [has_panels(CpuKernels(level), d) for d in (float32, bfloat16, torch.float64)]
        for level in ("none", "avx2", "avx512", "avx512_bf16", "amx")
    }
    assert levels == {
        "none": [False, False, False],
        "avx2": [True, True, False],
        "avx512": [False, True, False],
        "avx512_bf16": [False, False, False],
        "amx": [False, False, False],
    }
    assert activation_dtype(CpuKernels("avx2"), bfloat16) == float32
    assert activation_dtype(CpuKernels("amx"), bfloat16) == bfloat16
    assert activation_dtype(NO_CPU_KERNELS, bfloat16) == bfloat16


def test_rows_are_rounded_for_onednn() -> None:
    round_rows = torch_backend.TorchBackend().round_rows
    assert [round_rows(n) for n in (1, 8, 9, 129, 257, 1025)] == [1, 8, 16, 160, 384, 1280]
    assert sorted({round_rows(n) for n in range(1, 18)}) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
