"""FP8 keys and values: codes as torch rounds them, and attention over them as over the numbers they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.kernels import contract, reference
from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.paged_plan import BLOCK_SIZE as BLOCK
from gristmill.kernels.torch.attention import TorchKVCache
from gristmill.kernels.torch.backend import TorchBackend
from tests.kernels.test_paged_cpu import CASES, Step, make_backend, make_cache

FP8 = torch.float8_e4m3fn
FINITE_CODES = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
NO_TURN = contract.RopeTables(torch.ones(1, 128), torch.zeros(1, 128))
TOLERANCE = dict(atol=2e-6, rtol=1e-5)
needs_avx2 = pytest.mark.skipif(detect_level() == "none", reason="this CPU has no AVX2")


@pytest.fixture(scope="module", params=[pytest.param("avx2", marks=needs_avx2), "torch"])
def backend(request):
    return TorchBackend() if request.param == "torch" else make_backend("avx2")


@pytest.fixture(scope="module")
def avx2():
    return make_backend("avx2")


class Fp8Step(Step):
    """A step whose cache holds codes; exact: the scales are powers of two."""

    def __init__(self, *args, exact=False, **settings):
        super().__init__(*args, **settings)
        scales = torch.rand(2, 2, self.kv_heads, generator=self.generator) * 0.05 + 0.002
        self.scales = contract.KVScales(*(scales.log2().round().exp2() if exact else scales))

    def allocate(self, backend, kv_dtype):
        scales = self.scales if kv_dtype == FP8 else None
        return make_cache(backend, 2, self.num_blocks, self.heads, self.kv_heads, self.dim, kv_dtype, scales)

    def kept(self, kv, kv_dtype):
        sides = zip(kv.unbind(1), self.scales, strict=True)
        return torch.stack([reference.round_kv(side, scales[1]) for side, scales in sides], 1)


def append_rows(backend, rows, scale, kv_dtype=FP8):
    """(cache, keys, values) of one sequence and one KV head, rows before the rotation: [num_tokens, dim].

    A rotation by nothing still turns some -0 into 0, and what stands beside an infinity into a NaN.
    """
    n, dim = rows.shape
    scales = contract.KVScales(torch.tensor([[scale]]), torch.tensor([[scale]])) if kv_dtype == FP8 else None
    cache = make_cache(backend, 1, -(-n // BLOCK), 1, 1, dim, kv_dtype, scales)
    qkv = torch.cat([torch.zeros_like(rows), rows, rows], 1)
    tables = contract.RopeTables(*(table[:, : dim // 2].contiguous() for table in NO_TURN))
    cache.append(0, qkv, tables, torch.zeros(n, dtype=torch.int64), torch.arange(n))
    return cache, qkv[:, dim : 2 * dim], qkv[:, 2 * dim :]


def stored_codes(cache, n):
    """(codes of the keys, of the values): [n, dim] uint8."""
    if isinstance(cache, TorchKVCache):
        return tuple(side.view(torch.uint8)[0].flatten(0, 1)[:n] for side in cache.storage[0])
    keys, values = (side.view(torch.uint8)[:, 0, 0] for side in (cache.keys, cache.values))
    keys = keys.unflatten(1, (cache.spec.head_dim, BLOCK)).transpose(1, 2)
    return keys.flatten(0, 1)[:n], values.unflatten(1, (BLOCK, cache.spec.head_dim)).flatten(0, 1)[:n]


def read_value(cache, dim):
    """The output of attention over the first token alone: its value."""
    batch = contract.AttentionBatch(np.arange(2), np.ones(1, np.int64), np.zeros((1, 1), np.int32))
    return cache.attend(0, torch.zeros(1, 3 * dim), cache.plan(batch), 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0371])
def test_numbers_become_the_codes_that_torch_rounds_them_to(backend, dtype, scale):
    generator = torch.Generator().manual_seed(1)
    codes = FINITE_CODES.view(FP8).float().sort().values
    ties = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([ties.nextafter(torch.tensor(s * 1e9)) for s in (-1, 1)])
    large = torch.tensor([448, 463.9, 464, 465, 1e4, 3e38, 1e-45, 2.0**-10, 2.0**-9, 0.0]).repeat(2)
    spread = torch.randn(1000, generator=generator) * torch.logspace(-6, 4, 1000)
    x = torch.cat([codes, ties, beside, large, -large, spread])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64).mul(scale).to(dtype)
    storage, *sides = append_rows(backend, x, scale)
    for got, side in zip(stored_codes(storage, len(x)), sides, strict=True):
        want = (side.float() / scale).clamp(-448, 448).to(FP8).view(torch.uint8)
        assert torch.equal(got, want)


def test_too_large_is_the_largest_code_and_not_a_number_stays_so(backend):
    x = torch.tensor([float("inf"), -float("inf"), 1e30, -449, float("nan"), 1]).repeat(8)[None]
    storage, *_ = append_rows(backend, x, 1.0)
    values = stored_codes(storage, 1)[1][0, :6].view(FP8).float()
    assert values[:4].tolist() == [448, -448, 448, -448] and values[4].isnan() and values[5] == 1


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 0.0371])
def test_every_finite_code_is_read_as_its_number(backend, scale):
    numbers = torch.nn.functional.pad(FINITE_CODES.view(FP8).float(), (0, 2))[None] * scale  # one head of 256
    storage, *_ = append_rows(backend, numbers, scale)
    got = read_value(storage, 256)
    if scale == 0.0371:
        torch.testing.assert_close(got, numbers, atol=0, rtol=3e-7)
    else:
        assert torch.equal(got, numbers)


@needs_avx2
@pytest.mark.parametrize("name", [name for name in CASES if "many decode rows" not in name])
def test_attention_equals_the_reference_over_rounded_keys_whatever_blocks_held_before(avx2, name):
    got, want = Fp8Step(**CASES[name]).run(avx2, kv_dtype=FP8, poison=True)
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [
        "prefill and decode together",
        "nested prefixes",
        "a long prompt",
        "heads of 80",
        "a window over chunked prompts",
    ],
)
def test_attention_by_torch_equals_the_reference_over_rounded_keys(name):
    got, want = Fp8Step(**CASES[name]).run(TorchBackend(), kv_dtype=FP8)
    torch.testing.assert_close(got, want, **TOLERANCE)


@needs_avx2
@pytest.mark.parametrize("name", ["prefill and decode together", "nested prefixes", "a long prompt"])
def test_with_scales_of_powers_of_two_it_is_bit_for_bit_attention_in_float32(avx2, name):
    step, plain = Fp8Step(**CASES[name], exact=True), Fp8Step(**CASES[name], exact=True)
    plain.kv = [plain.kept(kv, FP8) for kv in plain.kv]
    assert torch.equal(step.run(avx2, kv_dtype=FP8)[0], plain.run(avx2, kv_dtype=torch.float32)[0])


@needs_avx2
@pytest.mark.parametrize("side", [0, 1], ids=["key", "value"])
def test_a_key_or_value_that_is_not_a_number_spoils_its_own_sequence_only(avx2, side):
    step = Fp8Step(lens=[40, 33, 20], new=[1, 33, 1])
    step.kv[1][5, side, :, 3] = float("nan")
    got, _ = step.run(avx2, kv_dtype=FP8)
    spoilt = got.isnan().flatten(1).any(1)
    assert not spoilt[0] and not spoilt[-1] and spoilt[6:-1].all()


def test_bfloat16_activations_come_out_within_their_precision(backend):
    got, want = Fp8Step(**CASES["nested prefixes"], dtype=torch.bfloat16).run(backend, kv_dtype=FP8)
    torch.testing.assert_close(got.float(), want.float(), atol=1e-2, rtol=1e-2)


def test_copied_blocks_hold_the_same_codes(backend):
    storage, *_ = append_rows(backend, torch.randn(3 * BLOCK, 16), 0.01)
    before = [codes.clone() for codes in stored_codes(storage, 3 * BLOCK)]
    storage.copy_blocks(np.array([[0, 2]], dtype=np.int32))
    for codes, old in zip(stored_codes(storage, 3 * BLOCK), before, strict=True):
        assert torch.equal(codes[2 * BLOCK :], old[:BLOCK]) and torch.equal(codes[:BLOCK], old[:BLOCK])
        assert torch.equal(codes[BLOCK : 2 * BLOCK], old[BLOCK : 2 * BLOCK])


@needs_avx2
def test_scales_of_another_model_are_refused(avx2):
    scales = contract.KVScales(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 3\]; the cache needs \[2, 1\]"):
        make_cache(avx2, 2, 4, dtype=FP8, scales=scales)


def test_a_cache_like_another_has_its_type_scales_and_a_size_of_its_own():
    scales = contract.KVScales(torch.full((1, 2), 0.5), torch.full((1, 2), 0.25))
    cache = make_cache(TorchBackend(), 1, 4, kv_heads=2, dtype=FP8, scales=scales).like(7)
    assert cache.num_blocks == 7 and cache.spec.scales is scales and cache.storage[0][0].dtype == FP8


@pytest.fixture(scope="module")
def emulated():
    """The code of the highest level, in instructions this CPU has."""
    return make_backend("amx", emulate=True)


@needs_avx2
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["prefill and decode together", "nested prefixes", "groups of 7 heads", "heads of 80"]
)
def test_at_the_highest_level_attention_equals_the_reference(emulated, name, dtype):
    got, want = Fp8Step(**CASES[name], dtype=dtype).run(emulated, kv_dtype=FP8, poison=True)
    tolerance = TOLERANCE if dtype == torch.float32 else dict(atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got.float(), want.float(), **tolerance)


@needs_avx2
def test_at_the_highest_level_numbers_are_rounded_and_read_alike(emulated):
    test_every_finite_code_is_read_as_its_number(emulated, 1.0)
    test_numbers_become_the_codes_that_torch_rounds_them_to(emulated, torch.float32, 0.25)
    test_too_large_is_the_largest_code_and_not_a_number_stays_so(emulated)
