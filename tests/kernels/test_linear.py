"""Linear layers on every path, beside float64 products: odd shapes, all epilogues, both weight types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.library import NO_CPU_KERNELS, CpuKernels, load_library
from gristmill.kernels.cpu.linear import PanelLinear, activation_dtype, has_panels
from gristmill.kernels.linear import GatedLinear, Linear, round_rows, warm_sizes

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16, 48, 191, 193, 400)
SHAPES = ((1, 1), (16, 8), (17, 5), (33, 64), (8, 1025), (40, 515), (96, 576))  # out, in


@pytest.fixture(scope="module", params=["avx2", "16 lanes, emulated"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    if request.param == "avx2":
        return CpuKernels("avx2", load_library("avx2"))
    # Linear takes its panels at level avx2 only; the library inside is what counts here.
    return CpuKernels("avx2", load_library("amx", emulate=True))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, in_features: int) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6 * max(1, in_features) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_and_features_is_multiplied(
    kernels: CpuKernels, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = random(*shape, seed=1, dtype=dtype)
    linear = Linear(weight, kernels=kernels)
    assert linear.any_rows
    for rows in ROWS:
        x = random(rows, shape[1], seed=rows)
        assert_close(linear(x), x.double() @ weight.double().T, shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 48), (37, 31)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_epilogues_follow_the_product(
    kernels: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    weight = random(*shape, seed=1, dtype=dtype)
    bias = random(shape[0], seed=2, dtype=dtype) if has_bias else None
    linear = Linear(weight, bias, kernels)
    for rows in (1, 5, 64):
        x, y = random(rows, shape[1], seed=3), random(rows, shape[0], seed=4)
        plain = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert_close(linear(x), plain, shape[1])
        assert_close(linear.silu(x), functional.silu(plain), shape[1])
        assert_close(linear.mul(x, y), plain * y, 4 * shape[1])
        assert_close(linear.add(x, y), plain + y, shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40, 48), (37, 31)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_pair_is_one_product(
    kernels: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    gate, up = random(*shape, seed=1, dtype=dtype), random(*shape, seed=2, dtype=dtype)
    biases = [random(shape[0], seed=s) if has_bias else None for s in (5, 6)]
    gated = GatedLinear(gate, up, *biases, kernels=kernels)
    doubles = [None if b is None else b.double() for b in biases]
    for rows in (1, 7, 200):
        x = random(rows, shape[1], seed=3)
        left = functional.linear(x.double(), gate.double(), doubles[0])
        right = functional.linear(x.double(), up.double(), doubles[1])
        assert_close(gated(x), functional.silu(left) * right, 16 * shape[1])


def test_rows_may_lie_apart_and_columns_too(kernels: CpuKernels) -> None:
    weight = random(24, 40)
    linear = Linear(weight, kernels=kernels)
    wide = random(9, 100, seed=1)
    expected = wide[:, 3:43].double() @ weight.double().T
    assert_close(linear(wide[:, 3:43]), expected, 40)
    assert_close(linear(wide[:, 3:43].T.contiguous().T), expected, 40)
    other = random(9, 60, seed=2)[:, 7:31]
    assert_close(linear.add(wide[:, 3:43], other), expected + other, 40)


def test_infinities_and_nan_arrive(kernels: CpuKernels) -> None:
    x = torch.tensor([[1.0, 2.0], [float("inf"), 0.5], [float("nan"), 0.0], [-float("inf"), 1.0]])
    linear = Linear(torch.ones(3, 2), kernels=kernels)
    torch.testing.assert_close(linear(x), x.sum(1, keepdim=True).expand(4, 3), equal_nan=True)
    silu = linear.silu(x[:3])
    assert silu[1].eq(float("inf")).all() and silu[2].isnan().all()
    assert linear.silu(torch.full((1, 2), -200.0)).abs().max() < 1e-30


def test_a_product_does_not_depend_on_the_other_rows(kernels: CpuKernels) -> None:
    linear = Linear(random(50, 576), kernels=kernels)
    x = random(300, 576, seed=1)
    whole = linear(x)
    assert torch.equal(whole, torch.cat([linear(x[:1]), linear(x[1:4]), linear(x[4:])]))


def test_threads_change_nothing(kernels: CpuKernels) -> None:
    linear = Linear(random(96, 64), kernels=kernels)
    x = random(100, 64, seed=1)
    expected, num_threads = linear(x), torch.get_num_threads()
    try:
        for n in (1, 3, 8):
            torch.set_num_threads(n)
            assert torch.equal(linear(x), expected)
    finally:
        torch.set_num_threads(num_threads)


def test_bfloat16_activations_are_taken_and_given_back(kernels: CpuKernels) -> None:
    weight, x = random(32, 64, dtype=torch.bfloat16), random(5, 64, seed=1, dtype=torch.bfloat16)
    y = Linear(weight, kernels=kernels)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, (x.double() @ weight.double().T).bfloat16())


@pytest.mark.parametrize("rows", [1, 5, 64, 1100])
def test_without_kernels_torch_gives_the_same(rows: int) -> None:
    weight, up, bias = random(48, 40), random(48, 40, seed=1), random(48, seed=2)
    linear, gated = Linear(weight, bias), GatedLinear(weight, up)
    x, y = random(rows, 40, seed=3), random(rows, 48, seed=4)
    plain = functional.linear(x.double(), weight.double(), bias.double())
    assert_close(linear(x), plain, 40)
    assert_close(linear.silu(x), functional.silu(plain), 40)
    assert_close(linear.mul(x, y), plain * y, 160)
    assert_close(linear.add(x, y), plain + y, 40)
    assert_close(
        gated(x), functional.silu(x.double() @ weight.double().T) * (x.double() @ up.double().T), 640
    )


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
    assert not isinstance(Linear(random(3, 4)).runners[0], PanelLinear)


def test_rows_are_rounded_only_for_onednn() -> None:
    assert [round_rows(n) for n in (1, 8, 9, 129, 257, 1025)] == [1, 8, 16, 160, 384, 1280]
    assert [round_rows(n, any_rows=True) for n in (1, 9, 1025)] == [1, 9, 1025]
    assert warm_sizes(17) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    assert warm_sizes(17, any_rows=True) == []
