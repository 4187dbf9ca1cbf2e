"""All layers in one call: bit for bit what the kernels give one by one, for all rows of a step or for some."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gristmill.engine.build import random_weights
from gristmill.engine.config import ModelConfig
from gristmill.engine.model.decoder import Model
from gristmill.engine.quantize.rtn import quantize_rtn
from gristmill.kernels.contract import AttentionBatch, Backend, KVCache, KVScales, LayerStack
from gristmill.kernels.cpu.backend import CpuBackend
from gristmill.kernels.cpu.features import detect_level
from gristmill.kernels.cpu.layers import CompiledStack
from gristmill.kernels.cpu.library import CpuKernels, load_library
from gristmill.kernels.torch.backend import TorchBackend

PLAIN = ModelConfig(
    architecture="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_size=128,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
CONFIGS = {
    "plain": PLAIN,
    "biases": dataclasses.replace(PLAIN, qkv_bias=True, output_bias=True, mlp_bias=True),
    "head norms": dataclasses.replace(PLAIN, qk_norm=True),
    "window": dataclasses.replace(PLAIN, sliding_window=20),
}
NUM_BLOCKS = 12
# A prompt each, then one token each, then a chunk of one and a token of the other.
STEPS = [([0, 0], [21, 5]), ([21, 5], [22, 6]), ([22, 6], [39, 7])]
KEPT = [[20, 25], [], [3, 16, 17]]  # some rows of each step


def backend_or_skip() -> CpuBackend:
    """A library that can't be built is an error: only a CPU without AVX2 skips, and in CI test_cpu_library.py fails."""
    if detect_level() == "none":
        pytest.skip("this CPU has no AVX2")
    return CpuBackend(CpuKernels("avx2", load_library("avx2")))


def make_weights(config: ModelConfig, dtype: torch.dtype, change):
    """Random weights with biases and norms that are not zero or one; `change` has the last word on each."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in random_weights(config, dtype):
        if tensor.dim() == 1:
            tensor = tensor + 0.3 * torch.randn(tensor.shape, generator=generator).to(dtype)
        yield name, change(name, tensor)


def step(
    model: Model, cache: KVCache, starts: list[int], lengths: list[int], kept: list[int] | None = None
) -> torch.Tensor:
    """One step of two sequences with blocks of their own: tokens starts[i]:lengths[i] of each."""
    counts = np.array(lengths) - starts
    tables = np.arange(NUM_BLOCKS, dtype=np.int32).reshape(2, -1)
    loc = np.concatenate([[0], np.cumsum(counts)])
    batch = AttentionBatch(loc, np.array(lengths), tables, sliding_window=model.config.sliding_window)
    ids = (7 * batch.positions() + 3 * np.repeat([0, 1], counts) + 1) % 96
    chosen = None if kept is None else np.array(kept, np.int64)
    with torch.inference_mode():
        return model.forward(model.build_input(ids, batch, cache, chosen), cache)


def check_same(config: ModelConfig, backend: Backend, change, dtype=torch.float32, kv=torch.float32) -> None:
    model = Model(config, make_weights(config, dtype, change), dtype, 128, backend)
    compiled = model.stack
    assert isinstance(compiled, CompiledStack)
    scales = None
    if kv == torch.float8_e4m3fn:
        shape = (config.num_layers, config.num_kv_heads)
        scales = KVScales(*(2.0 ** torch.arange(-8, -2).float().view(shape) * factor for factor in (1, 2)))
    cache = backend.kv_cache(model.kv_spec(kv, scales), NUM_BLOCKS)
    found = []
    loop = LayerStack(backend, model.layers, model.rope, config.rms_norm_eps, model.padded_rows)
    for model.stack in (compiled, loop):
        own = cache.like(NUM_BLOCKS)
        found.append([step(model, own, *each) for each in STEPS])
        own = cache.like(NUM_BLOCKS)
        found.append([step(model, own, *each, kept) for each, kept in zip(STEPS, KEPT, strict=True)])
    for rows, one_call, of_one_call, one_by_one, of_one_by_one in zip(KEPT, *found, strict=True):
        assert torch.isfinite(one_call).all() and one_call.abs().max() > 0.01
        assert torch.equal(one_call, one_by_one)
        assert torch.equal(of_one_call, of_one_by_one)
        if dtype == torch.float32:
            assert torch.equal(of_one_call, one_call[rows])
        else:  # the sums of these weights depend on the number of rows
            torch.testing.assert_close(of_one_call, one_call[rows], rtol=1e-4, atol=1e-5)


def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def to_codes(kind: str, group_size: int | None, where: str = "_proj.weight"):
    def change(name: str, tensor: torch.Tensor):
        return quantize_rtn(tensor, kind, group_size) if where in name else tensor

    return change


@pytest.mark.parametrize("name", CONFIGS)
def test_float_layers_in_one_call_give_the_same_bits(name: str) -> None:
    check_same(CONFIGS[name], backend_or_skip(), keep)


def test_bfloat16_weights_and_cache_too() -> None:
    check_same(PLAIN, backend_or_skip(), keep, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(("kind", "group_size"), [("int4", 32), ("int8", None), ("fp8", None)])
def test_weights_in_codes_too(kind: str, group_size: int | None) -> None:
    check_same(CONFIGS["biases"], backend_or_skip(), to_codes(kind, group_size))


@pytest.mark.parametrize("where", ["v_proj.weight", "q_proj.weight", "down_proj.weight"])
def test_layers_of_unlike_parts_too(where: str) -> None:
    check_same(CONFIGS["biases"], backend_or_skip(), to_codes("int8", None, where))


def test_an_fp8_cache_has_scales_of_each_layer() -> None:
    check_same(PLAIN, backend_or_skip(), keep, kv=torch.float8_e4m3fn)


def test_lanes_of_512_bits_too() -> None:
    backend_or_skip()
    backend = CpuBackend(CpuKernels("avx2", load_library("avx512", emulate=True)))
    check_same(CONFIGS["head norms"], backend, to_codes("int4", 32))


def test_what_the_kernels_do_not_run_is_left_to_the_layers_themselves() -> None:
    backend, odd = backend_or_skip(), dataclasses.replace(PLAIN, head_dim=24)
    gate = to_codes("int8", None, "gate_proj.weight")  # its factor up is float: not one pass
    for config, change, runs_on in (
        (PLAIN, gate, backend),
        (PLAIN, keep, TorchBackend()),
        (odd, keep, backend),
    ):
        model = Model(config, make_weights(config, torch.float32, change), torch.float32, 128, runs_on)
        assert type(model.stack) is LayerStack
