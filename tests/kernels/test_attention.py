"""Paged attention by torch's kernels against the reference, and which backend a device and a CPU get."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.kernels import contract, dispatch, reference
from gristmill.kernels.cpu.backend import CpuBackend
from gristmill.kernels.cpu.paged import PagedKVCache
from gristmill.kernels.torch.attention import TorchKVCache
from gristmill.kernels.torch.backend import TorchBackend
from tests.kernels.test_paged_cpu import CASES, Step, make_cache

BACKEND = TorchBackend()
MORE_CASES = {"heads of a size that only torch can do": dict(lens=[70, 50, 81], new=[1, 18, 3], dim=24)}


@pytest.mark.parametrize("case", (CASES | MORE_CASES).values(), ids=[*CASES, *MORE_CASES])
def test_paged_attention_equals_the_reference(case):
    got, want = Step(**case).run(BACKEND)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_paged_attention_in_bfloat16_stays_within_its_precision():
    got, want = Step(**CASES["nested prefixes"], dtype=torch.bfloat16).run(BACKEND)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_blocks_are_copied_in_every_layer_pair_after_pair():
    cache = make_cache(BACKEND, 2, 4, 2, 2, 8)
    sides = [side for sides in cache.storage for side in sides]
    for side in sides:
        side.copy_(torch.randn(side.shape))
    want = [side[:, 1].clone() for side in sides]
    cache.copy_blocks(np.array([[1, 2], [2, 3]], np.int32))
    for side, block in zip(sides, want, strict=True):
        assert torch.equal(side[:, 2], block) and torch.equal(side[:, 3], block)


def test_queries_and_keys_are_rotated_in_place():
    dim, angles = 8, torch.randn(9, 4)
    cache = make_cache(BACKEND, num_blocks=1, heads=1, dim=dim)
    qkv, positions, slots = torch.randn(3, 3 * dim), torch.tensor([8, 0, 3]), torch.tensor([2, 0, 5])
    before = qkv.clone().view(3, 3, dim)
    cache.append(0, qkv, contract.RopeTables(angles.cos(), angles.sin()), positions, slots)
    turned = reference.rope(before[:, :2], *(t[positions][:, None] for t in (angles.cos(), angles.sin())))
    torch.testing.assert_close(qkv.view(3, 3, dim), torch.cat([turned, before[:, 2:]], 1))
    assert torch.equal(cache.storage[0][0][0, 0, slots], qkv.view(3, 3, dim)[:, 1])
    assert torch.equal(cache.storage[0][1][0, 0, slots], before[:, 2])


def test_a_step_without_tokens_is_empty():
    cache = make_cache(BACKEND, dim=8)
    batch = contract.AttentionBatch(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    assert cache.attend(0, torch.zeros(0, 32), cache.plan(batch), 1.0).shape == (0, 16)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(ValueError, match="'meta'; this build runs on: cpu"):
        dispatch.choose_backend("meta")


def test_the_compiled_kernels_are_used_where_they_are_and_can_do_the_heads():
    backend = dispatch.choose_backend()
    is_compiled = isinstance(backend, CpuBackend)
    assert isinstance(make_cache(backend, dim=64), PagedKVCache if is_compiled else TorchKVCache)
    assert isinstance(make_cache(backend, dim=24), TorchKVCache)
    assert type(dispatch.choose_backend("cpu", "none")) is TorchBackend
