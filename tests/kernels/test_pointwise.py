"""RMS norm and argmax of the C++ library beside torch's."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernels import reference
from gristmill.kernels.cpu.backend import CpuBackend
from gristmill.kernels.cpu.features import detect_level
from tests.kernels.test_paged_cpu import make_backend

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", params=["avx2", "amx"])
def pointwise(request: pytest.FixtureRequest) -> CpuBackend:
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    return make_backend(request.param, emulate=request.param != "avx2")


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 7), (2, 33), (5, 576), (300, 576)])
def test_rms_norm_is_the_reference(
    pointwise: CpuBackend, rows: int, size: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x = torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(0)).to(dtype)[:, 1 : size + 1]
    weight = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(weight_dtype)
    torch.testing.assert_close(
        pointwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), equal_nan=True
    )


def test_the_norm_of_zeros_is_zero(pointwise: CpuBackend) -> None:
    assert pointwise.rms_norm(torch.zeros(2, 40), torch.ones(40), 1e-5).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(0, 8), (1, 1), (3, 7), (4, 513), (3, 1030), (40, 49152)])
def test_argmax_is_the_first_largest(pointwise: CpuBackend, rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(pointwise.argmax(x), first_largest(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 600, 2000])
def test_ties_infinities_and_nan_are_as_in_torch(
    pointwise: CpuBackend, size: int, dtype: torch.dtype
) -> None:
    x = torch.full((8, size), -2.0, dtype=dtype)
    last = size - 1
    x[1, [2, last]] = 3
    x[2, :] = -INF
    x[3, [1, last]] = INF
    x[4, [0, 3]], x[4, last] = INF, NAN
    x[5, [2, last]] = NAN
    x[6, last] = 1
    x[7, :] = NAN
    assert pointwise.argmax(x).tolist() == [0, 2, 0, 1, last, 2, last, 0]
    assert torch.equal(pointwise.argmax(x), x.argmax(1))


def test_rows_of_logits_may_lie_apart(pointwise: CpuBackend) -> None:
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pointwise.argmax(x[:, 5:60]), x[:, 5:60].argmax(1))
    assert torch.equal(pointwise.argmax(x.T), x.argmax(0))


def first_largest(x: torch.Tensor) -> torch.Tensor:
    """torch promises no order among equals."""
    return torch.tensor([int(row.eq(row.max()).nonzero()[0]) for row in x], dtype=torch.int64)
