"""Paged attention by torch's kernels against the reference, and which backend a device and a CPU get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.kernels import ops
from gristmill.kernels.cpu import library as cpu_library
from gristmill.kernels.cpu import paged as paged_cpu
from gristmill.kernels.torch import attention as attention_cpu
from tests.kernels.test_paged_cpu import BLOCK, CASES, WINDOWS, Step, rotated

MORE_CASES = {
    "more decode rows than a bucket": dict(lens=list(range(3, 133)), new=[1] * 130),
    "heads of a size that only torch can do": dict(lens=[70, 50, 81], new=[1, 18, 3], dim=24),
}


@pytest.mark.parametrize("case", (CASES | MORE_CASES).values(), ids=[*CASES, *MORE_CASES])
def test_paged_attention_equals_the_reference(case):
    got, want = Step(**case).run(attention_cpu)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("case", WINDOWS.values(), ids=list(WINDOWS))
def test_in_a_sliding_window_a_shared_prefix_is_seen_through_the_window_only(case):
    case = dict(case)
    window = case.pop("window")
    got, want = Step(**case).run(attention_cpu, window=window)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_paged_attention_in_bfloat16_stays_within_its_precision():
    got, want = Step(**CASES["nested prefixes"], dtype=torch.bfloat16).run(attention_cpu)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_blocks_are_copied_in_every_layer_pair_after_pair():
    storage = attention_cpu.allocate_kv(2, 4, BLOCK, 2, 8, torch.float32)
    for cache in (cache for caches in storage for cache in caches):
        cache.copy_(torch.randn(cache.shape))
    want = [cache[:, 1].clone() for caches in storage for cache in caches]
    attention_cpu.copy_blocks(storage, np.array([[1, 2], [2, 3]], np.int32))
    for cache, block in zip((cache for caches in storage for cache in caches), want, strict=True):
        assert torch.equal(cache[:, 2], block) and torch.equal(cache[:, 3], block)


def test_queries_and_keys_are_rotated_in_place():
    dim, angles = 8, torch.randn(9, 4)
    storage = attention_cpu.allocate_kv(1, 1, BLOCK, 1, dim, torch.float32)
    qkv, positions, slots = torch.randn(3, 3 * dim), torch.tensor([8, 0, 3]), torch.tensor([2, 0, 5])
    before = qkv.clone().view(3, 3, dim)
    attention_cpu.append(
        storage, 0, qkv, ops.RopeTables(angles.cos(), angles.sin()), positions, slots, 1, None
    )
    turned = rotated(before[:, :2], angles.cos()[positions][:, None], angles.sin()[positions][:, None])
    torch.testing.assert_close(qkv.view(3, 3, dim), torch.cat([turned, before[:, 2:]], 1))
    assert torch.equal(storage[0][0][0, 0, slots], qkv.view(3, 3, dim)[:, 1])
    assert torch.equal(storage[0][1][0, 0, slots], before[:, 2])


def test_a_step_without_tokens_is_empty():
    cache = make_cache(8)
    batch = ops.AttentionBatch(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    assert cache.attend(0, torch.zeros(0, 32), cache.plan(batch), 1.0, 2).shape == (0, 16)


def make_cache(head_dim, device="cpu", kernels=cpu_library.NO_CPU_KERNELS):
    return ops.KVCache(1, 2, BLOCK, 1, head_dim, torch.float32, torch.device(device), kernels)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(ValueError, match="meta"):
        make_cache(8, "meta")


def test_the_compiled_kernels_are_used_where_they_are_and_can_do_the_heads():
    kernels = cpu_library.load_cpu_kernels()
    expected = paged_cpu.PagedStorage if kernels.library is not None else list
    assert isinstance(make_cache(64, kernels=kernels).storage, expected)
    assert isinstance(make_cache(24, kernels=kernels).storage, list)
    assert isinstance(make_cache(64).storage, list)
