"""Paged attention as compiled for the higher CPU levels, run in instructions this CPU has."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernels.cpu.features import detect_level
from tests.kernels.test_paged_cpu import CASES, Step, make_backend

pytestmark = pytest.mark.skipif(detect_level() == "none", reason="this CPU has no AVX2")
CASE_NAMES = [
    "one long decode row, its keys split over threads",
    "prefill and decode together",
    "nested prefixes",
    "a prefix of many decode rows",
    "groups of 7 heads",
    "heads of 80",
    "heads of 256",
]


# Level amx contains the code of the two below it but for what the tiles take over; each takes long to compile.
LEVELS = [
    "amx",
    pytest.param("avx512_bf16", marks=pytest.mark.long),
    pytest.param("avx512", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=LEVELS)
def backend(request):
    return make_backend(request.param, emulate=True)


@pytest.mark.parametrize("name", CASE_NAMES)
def test_attention_in_float32_equals_the_reference(backend, name):
    got, want = Step(**CASES[name]).run(backend)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [*CASE_NAMES, *(name for name, case in CASES.items() if "window" in case)])  # type: ignore[operator]
def test_attention_in_bfloat16_stays_within_its_precision_whatever_blocks_held_before(backend, name):
    got, want = Step(**CASES[name], dtype=torch.bfloat16).run(backend, poison=True)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_float32_queries_over_bfloat16_keys_compute_in_float32(backend):
    got, want = Step(**CASES["nested prefixes"]).run(backend, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
