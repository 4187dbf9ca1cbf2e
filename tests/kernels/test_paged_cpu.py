"""The C++ paged attention against the reference: odd lengths, nested groups, windows, head sizes, types, levels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gristmill.kernels import contract, reference
from gristmill.kernels.cpu.backend import CpuBackend
from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.library import CpuKernels, load_library
from gristmill.kernels.cpu.paged import PagedKVCache
from gristmill.kernels.cpu.paged_plan import BLOCK_SIZE as BLOCK

pytestmark = pytest.mark.skipif(detect_level() == "none", reason="this CPU has no AVX2")


@pytest.fixture(scope="module")
def backend():
    return make_backend("avx2")


def make_backend(level, emulate=False):
    return CpuBackend(CpuKernels(level, load_library(level, emulate)))


def make_cache(
    backend, num_layers=1, num_blocks=2, heads=2, kv_heads=1, dim=16, dtype=torch.float32, scales=None
):
    spec = contract.KVSpec(num_layers, heads, kv_heads, dim, BLOCK, dtype, scales)
    return backend.kv_cache(spec, num_blocks)


class Step:
    """Random sequences in a KV cache: `lens` tokens each, the last `new` of them queries of this step.

    groups: (first_sequence, num_sequences, first_block, num_blocks), sharing those blocks' ids and contents.
    """

    def __init__(
        self, lens, new, groups=(), heads=6, kv_heads=2, dim=64, dtype=torch.float32, seed=7, window=None
    ):
        self.generator = torch.Generator().manual_seed(seed)
        self.lens, self.new, self.heads, self.kv_heads, self.dim = lens, new, heads, kv_heads, dim
        self.dtype, self.window = dtype, window
        self.kv = [self.random(n, 2, kv_heads, dim) for n in lens]
        self.queries = [self.random(n, heads, dim) for n in new]
        self.num_blocks = sum(-(-n // BLOCK) for n in lens) + 1
        self.tables = np.zeros((len(lens), max(-(-n // BLOCK) for n in lens) + 2), dtype=np.int32)
        ids = iter(torch.randperm(self.num_blocks, generator=self.generator).tolist())
        for i, n in enumerate(lens):
            for b in range(-(-n // BLOCK)):
                self.tables[i, b] = next(ids)
        for first, count, block, num in groups:
            for i in range(first + 1, first + count):
                self.tables[i, block : block + num] = self.tables[first, block : block + num]
                tokens = slice(block * BLOCK, (block + num) * BLOCK)
                self.kv[i][tokens] = self.kv[first][tokens]
        self.groups = tuple(contract.PrefixGroup(*g) for g in groups)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def slots(self, i, start=0):
        token = torch.arange(start, self.lens[i])
        return torch.from_numpy(self.tables[i])[token // BLOCK].long() * BLOCK + token % BLOCK

    def fill(self, backend, kv_dtype, poison=False):
        """A cache with all sequences' keys and values; poison: every slot held NaN before."""
        cache = self.allocate(backend, kv_dtype or self.dtype)
        if poison:
            cache.keys.fill_(float("nan"))
            cache.values.fill_(float("nan"))
        no_turn = contract.RopeTables(torch.ones(1, self.dim // 2), torch.zeros(1, self.dim // 2))
        for i, n in enumerate(self.lens):
            qkv = torch.cat(
                [torch.zeros(n, self.heads, self.dim, dtype=self.dtype), *self.kv[i].unbind(1)], 1
            )
            positions = torch.zeros(n, dtype=torch.int64)
            cache.append(1, qkv.flatten(1), no_turn, positions, self.slots(i))
        return cache

    def allocate(self, backend, kv_dtype):
        return make_cache(backend, 2, self.num_blocks, self.heads, self.kv_heads, self.dim, kv_dtype)

    def kept(self, kv, kv_dtype):
        """What the cache makes of keys and values kv: [num_tokens, 2, kv_heads, dim]."""
        return kv.to(kv_dtype)

    def batch(self):
        starts = np.concatenate([[0], np.cumsum(self.new)]).astype(np.int64)
        return contract.AttentionBatch(
            starts, np.array(self.lens, dtype=np.int64), self.tables, self.groups, self.window
        )

    def run(self, backend, kv_dtype=None, padding=3, poison=False):
        """(the kernel's output, the reference's) of layer 1."""
        cache = self.fill(backend, kv_dtype, poison)
        q = torch.cat([*self.queries, torch.ones(padding, self.heads, self.dim, dtype=self.dtype)])
        qkv = torch.cat([q, torch.zeros(len(q), 2 * self.kv_heads, self.dim, dtype=self.dtype)], 1).flatten(1)
        out = cache.attend(1, qkv, cache.plan(self.batch()), self.dim**-0.5)
        assert out.dtype == self.dtype and (out[len(q) - padding :] == 0).all()
        stored = [self.kept(kv, kv_dtype or self.dtype) for kv in self.kv]
        want = [
            reference.causal_attention(q, *kv.unbind(1), self.dim**-0.5, self.window)  # type: ignore[call-arg]
            for q, kv in zip(self.queries, stored, strict=True)
        ]
        return out[: len(q) - padding].unflatten(1, (self.heads, self.dim)), torch.cat(want)


CASES = {
    "one decode row": dict(lens=[1], new=[1]),
    "one long decode row, its keys split over threads": dict(lens=[5000], new=[1]),
    "decode rows of many lengths": dict(lens=[1, 15, 16, 17, 100, 33], new=[1] * 6),
    "decode rows of several chunks of keys": dict(lens=[300, 127, 128, 129, 700], new=[1] * 5),
    "whole prompts": dict(lens=[5, 16, 40, 41], new=[5, 16, 40, 41]),
    "a long prompt": dict(lens=[301], new=[301]),
    "chunks in the middle of prompts": dict(lens=[40, 64, 290], new=[8, 16, 133]),
    "prefill and decode together": dict(lens=[40, 7, 90, 18, 200, 5], new=[40, 1, 10, 1, 70, 2]),
    "many decode rows": dict(lens=list(range(3, 133)), new=[1] * 130),
    "a shared prefix": dict(lens=[70, 50, 81, 33], new=[1, 18, 3, 1], groups=[(0, 4, 0, 2)]),
    "a shared prefix beside others": dict(
        lens=[9, 70, 50, 81, 33], new=[9, 1, 18, 49, 1], groups=[(1, 3, 0, 2)]
    ),
    "nested prefixes": dict(
        lens=[70, 90, 81, 33, 120, 65, 40, 17],
        new=[1, 18, 3, 1, 40, 1, 1, 1],
        groups=[(0, 8, 0, 1), (0, 3, 1, 2), (4, 3, 1, 1), (4, 2, 2, 2)],
    ),
    "a prefix of many decode rows": dict(
        lens=[260 + i for i in range(70)], new=[1] * 70, groups=[(0, 70, 0, 16)]
    ),
    "a prefix longer than a chunk of keys": dict(lens=[700, 650], new=[31, 1], groups=[(0, 2, 0, 38)]),
    "no grouped heads": dict(lens=[20, 3], new=[4, 3], heads=2, kv_heads=2),
    "groups of 16 heads": dict(lens=[20, 3, 50], new=[4, 3, 1], heads=16, kv_heads=1),
    "groups of 7 heads": dict(lens=[40, 3, 50], new=[33, 3, 1], heads=14, kv_heads=2),
    "heads of 16": dict(lens=[20, 3, 40], new=[4, 3, 1], dim=16),
    "heads of 80": dict(lens=[20, 3, 40], new=[4, 3, 1], dim=80),
    "heads of 128": dict(lens=[20, 3, 40], new=[20, 3, 1], dim=128),
    "heads of 256": dict(lens=[20, 3, 40], new=[20, 3, 1], dim=256, heads=2, kv_heads=1),
    "a window over chunked prompts": dict(lens=[70, 50, 20, 300], new=[1, 18, 20, 140], window=16),
    "a window of one": dict(lens=[70, 50, 20], new=[1, 18, 20], window=1),
    "a prefix partly and wholly out of sight": dict(
        lens=[70, 50, 81, 33], new=[1, 18, 3, 1], groups=[(0, 4, 0, 2)], window=30
    ),
    "a window wider than the sequences": dict(lens=[70, 50], new=[1, 18], window=1000),
}


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_attention_equals_the_reference_in_float32_whatever_blocks_held_before(backend, case, kv_dtype):
    got, want = Step(**case).run(backend, kv_dtype=kv_dtype, poison=True)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_bfloat16_activations_come_out_within_their_precision(backend):
    got, want = Step(**CASES["nested prefixes"], dtype=torch.bfloat16).run(backend)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_a_query_that_is_not_a_number_spoils_its_own_row_only(backend):
    step = Step(**CASES["a shared prefix"])
    step.queries[1][4] = float("nan")
    got, want = step.run(backend)
    assert got[5].isnan().all() and want[5].isnan().all()
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5, equal_nan=True)


def test_a_step_without_rows_is_empty(backend):
    cache = make_cache(backend)
    batch = contract.AttentionBatch(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    plan = cache.plan(batch)
    assert cache.attend(0, torch.zeros(0, 4 * 16), plan, 1.0).shape == (0, 2 * 16)
    assert cache.attend(0, torch.ones(2, 4 * 16), plan, 1.0).abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["no norms", "head norms"])
def test_appending_norms_rotates_and_stores(backend, dtype, normed):
    heads, kv_heads, dim, num_tokens = 6, 2, 32, 21
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(num_tokens + 2, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    angles = torch.randn(50, dim // 2, generator=generator)
    positions = torch.randint(50, (num_tokens + 2,), generator=generator)
    slots = torch.randperm(4 * BLOCK, generator=generator)[:num_tokens]
    norms = None
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    if normed:
        norms = contract.HeadNorms(*torch.randn(2, dim, generator=generator), 1e-6)  # type: ignore[call-arg]
        q, k = reference.rms_norm(q.float(), norms.q, 1e-6), reference.rms_norm(k.float(), norms.k, 1e-6)
    cos, sin = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
    want = torch.cat([reference.rope(q.float(), cos, sin), reference.rope(k.float(), cos, sin), v.float()], 1)

    cache = make_cache(backend, 1, 4, heads, kv_heads, dim, dtype)
    got = qkv.flatten(1).clone()
    tables = contract.RopeTables(angles.cos(), angles.sin())
    cache.append(0, got, tables, positions, slots, norms)
    got = got.unflatten(1, (-1, dim))
    tolerance = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(got[:num_tokens].float(), want[:num_tokens], **tolerance)
    assert torch.equal(got[num_tokens:], qkv[num_tokens:])
    keys, values = unpacked(cache)
    stored = torch.cat([keys[slots], values[slots]], 1)
    assert torch.equal(stored, got[:num_tokens, heads:])


def test_blocks_are_copied_in_every_layer_pair_after_pair(backend):
    for dtype in (torch.float32, torch.bfloat16):
        cache = make_cache(backend, 3, 6, 2, 2, 16, dtype)
        cache.keys.copy_(torch.randn(cache.keys.shape))
        cache.values.copy_(torch.randn(cache.values.shape))
        want = [t.clone() for t in (cache.keys, cache.values)]
        for t in want:
            t[4] = t[1]
            t[5] = t[4]
        cache.copy_blocks(np.array([[1, 4], [4, 5]], dtype=np.int32))
        assert torch.equal(cache.keys, want[0]) and torch.equal(cache.values, want[1])


@pytest.mark.parametrize(
    "size", [dict(block_size=32), dict(head_dim=24), dict(head_dim=272), dict(dtype=torch.float16)], ids=str
)
def test_storage_the_kernels_cannot_read_is_refused(backend, size):
    spec = dataclasses.replace(contract.KVSpec(1, 1, 1, 16, BLOCK, torch.float32), **size)
    with pytest.raises(ValueError, match="kernels take"):
        PagedKVCache(backend, backend.library, spec, 2)


def unpacked(storage):
    """Layer 0's keys and values by slot: [num_slots, kv_heads, head_dim]."""
    kv_heads, dim = storage.keys.shape[2], storage.spec.head_dim
    keys, values = (
        storage.keys[:, 0].transpose(0, 1),
        storage.values[:, 0].transpose(0, 1),
    )  # [KVH, NB, 16 * D]
    if storage.keys.dtype == torch.float32:
        keys, values = keys.unflatten(2, (dim, BLOCK)).transpose(2, 3), values.unflatten(2, (BLOCK, dim))
    else:
        keys = keys.unflatten(2, (dim // 2, BLOCK, 2)).transpose(2, 3).flatten(3)
        values = values.unflatten(2, (BLOCK // 2, dim, 2)).transpose(3, 4).flatten(2, 3)
    return tuple(t.flatten(1, 2).transpose(0, 1).reshape(-1, kv_heads, dim) for t in (keys, values))
