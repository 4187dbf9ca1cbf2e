"""Paged attention against the reference: odd lengths, prefix groups, windows, padding, both dtypes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import ops, reference

BLOCK = 16


def run_step(
    lens, new, *, group=None, window=None, heads=6, kv_heads=2, dim=32, dtype=torch.float32, padding=3
):
    """One step over random sequences; returns (ours, reference). group: (first, count, num_blocks) shares blocks."""
    generator = torch.Generator().manual_seed(7)
    keys = [torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lens]
    values = [torch.randn(n, kv_heads, dim, generator=generator).to(dtype) for n in lens]
    if group:
        first, count, blocks = group
        for i in range(first + 1, first + count):
            keys[i][: blocks * BLOCK] = keys[first][: blocks * BLOCK]
            values[i][: blocks * BLOCK] = values[first][: blocks * BLOCK]
    needed = [-(-n // BLOCK) for n in lens]
    ids = iter(torch.randperm(sum(needed) + 1, generator=generator).tolist())
    tables = np.zeros((len(lens), max(needed) + 2), dtype=np.int32)
    for i, count_blocks in enumerate(needed):
        for j in range(count_blocks):
            shared = group and group[0] < i < group[0] + group[1] and j < group[2]
            tables[i, j] = tables[group[0], j] if shared else next(ids)
    cache = ops.KVCache(1, sum(needed) + 1, BLOCK, kv_heads, dim, dtype, torch.device("cpu"))
    for i, n in enumerate(lens):
        slots = torch.tensor([int(tables[i, t // BLOCK]) * BLOCK + t % BLOCK for t in range(n)])
        cache.write(0, keys[i], values[i], slots)
    queries = [torch.randn(n, heads, dim, generator=generator).to(dtype) for n in new]
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int64)
    groups = (ops.PrefixGroup(*group),) if group else ()
    batch = ops.AttentionBatch(starts, np.array(lens, dtype=np.int64), tables, groups, window)
    q = torch.cat([*queries, torch.ones(padding, heads, dim, dtype=dtype)])
    got = cache.attend(0, q, cache.plan(batch), dim**-0.5)
    assert (got[len(q) - padding :] == 0).all()
    want = [
        reference.causal_attention(a, b, c, dim**-0.5, window)
        for a, b, c in zip(queries, keys, values, strict=True)
    ]
    return got[: len(q) - padding], torch.cat(want)


CASES = {
    "one decode row": dict(lens=[1], new=[1]),
    "decode rows of many lengths": dict(lens=[1, 15, 16, 17, 100, 33], new=[1] * 6),
    "whole prompts": dict(lens=[5, 16, 40, 41], new=[5, 16, 40, 41]),
    "chunks in the middle of prompts": dict(lens=[40, 64, 90], new=[8, 16, 33]),
    "prefill and decode together": dict(lens=[40, 7, 90, 18], new=[40, 1, 10, 1]),
    "more decode rows than a bucket": dict(lens=list(range(3, 133)), new=[1] * 130),
    "a shared prefix": dict(lens=[70, 50, 81, 33], new=[1, 18, 3, 1], group=(0, 4, 2)),
    "a shared prefix beside others": dict(lens=[9, 70, 50, 81, 33], new=[9, 1, 18, 49, 1], group=(1, 3, 2)),
    "a sliding window": dict(lens=[70, 50, 20], new=[1, 18, 20], window=16),
    "no grouped heads": dict(lens=[20, 3], new=[4, 3], heads=2, kv_heads=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_paged_attention_equals_the_reference(case):
    got, want = run_step(**case)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_paged_attention_in_bfloat16_stays_within_its_precision():
    got, want = run_step(lens=[70, 50, 81, 33], new=[1, 18, 3, 1], group=(0, 4, 2), dtype=torch.bfloat16)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


def test_a_step_without_tokens_is_empty():
    cache = ops.KVCache(1, 2, BLOCK, 1, 8, torch.float32, torch.device("cpu"))
    batch = ops.AttentionBatch(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
    assert cache.attend(0, torch.zeros(0, 2, 8), cache.plan(batch), 1.0).shape == (0, 2, 8)


def test_an_unknown_device_is_refused_by_name():
    with pytest.raises(ValueError, match="meta"):
        ops.KVCache(1, 2, BLOCK, 1, 8, torch.float32, torch.device("meta"))
