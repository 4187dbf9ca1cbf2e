"""What the C++ attention is given for a step: a plan of its own, or the last one grown by a key."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.kernels import contract
from gristmill.kernels.cpu import paged as paged_cpu
from gristmill.kernels.cpu import paged_plan
from gristmill.kernels.cpu.features import detect_level
from tests.kernels.test_paged_cpu import make_backend, make_cache

pytestmark = pytest.mark.skipif(detect_level() == "none", reason="this CPU has no AVX2")


def decode_batch(lens, groups=(), window=None):
    """A step of one row a sequence."""
    starts = np.arange(len(lens) + 1, dtype=np.int64)
    tables = np.arange(len(lens) * 9, dtype=np.int32).reshape(len(lens), 9)
    return contract.AttentionBatch(starts, np.array(lens, dtype=np.int64), tables, groups, window)


GROUPS = (
    contract.PrefixGroup(0, 3, 0, 4),
    contract.PrefixGroup(0, 2, 4, 2),
    contract.PrefixGroup(3, 2, 0, 3),
)


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["no groups", "groups"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_decode_step_grows_the_plan_of_the_last(groups, window, monkeypatch):
    cache, lens = make_cache(make_backend("avx2")), np.array([100, 97, 80, 60, 144, 1])
    cache.plan(decode_batch(lens, groups, window))
    with monkeypatch.context() as patch:
        patch.setattr(paged_cpu, "plan_arrays", None)  # not needed again
        for step in range(1, 20):
            batch = decode_batch(lens + step, groups, window)
            plan = cache.plan(batch)
    want = paged_plan.plan_arrays(batch, torch.get_num_threads())
    assert plan.arrays.keys() == want.keys()
    for name, array in want.items():
        if name == "tile_order":
            assert sorted(plan.arrays[name]) == sorted(array)
            continue
        assert plan.arrays[name].dtype == array.dtype and np.array_equal(plan.arrays[name], array), name
        assert getattr(plan.args, name) == plan.arrays[name].ctypes.data


@pytest.mark.parametrize(
    "after",
    [
        decode_batch([101, 98], (contract.PrefixGroup(0, 2, 0, 3),)),
        decode_batch([101], ()),
        decode_batch([101, 97], ()),
        decode_batch([101, 98], (), 64),
        contract.AttentionBatch(np.array([0, 2, 3]), np.array([101, 98]), np.zeros((2, 9), np.int32)),
    ],
    ids=["other groups", "a row less", "a row that stood still", "another window", "rows of a prompt"],
)
def test_any_other_step_gets_a_plan_of_its_own(after):
    cache = make_cache(make_backend("avx2"))
    cache.plan(decode_batch([100, 97]))
    plan = cache.plan(after)
    want = paged_plan.plan_arrays(after, torch.get_num_threads())
    assert all(np.array_equal(plan.arrays[name], array) for name, array in want.items())
