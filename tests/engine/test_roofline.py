"""The roofline: the arithmetic against KERNELS.md's formulas written out, and a calibration of this machine."""

from __future__ import annotations

import pytest
import torch

from gristmill.engine.build import random_weights
from gristmill.engine.checkpoint.weight_names import check_tensors
from gristmill.engine.config import ModelConfig
from gristmill.engine.measure.roofline import (
    MachineRates,
    StoredBits,
    calibrate,
    count_linear_flops,
    estimate_run,
    estimate_step,
)
from gristmill.engine.step_trace import StepRecord

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_size=512,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
)
RATES = MachineRates(bytes_per_s=1e9, flops_per_s=1e12)
SLOW_FLOPS = MachineRates(bytes_per_s=1e12, flops_per_s=1e9)
FLOAT32, BFLOAT16 = StoredBits(32, 32, 32), StoredBits(16, 16, 16)
NUM_LAYER_WEIGHTS = 64 * 128 + 64 * 64 + 64 * 192 + 96 * 64


def build_step(
    decode: int = 0, prefill: int = 0, sampled: int = 0, context: int = 0, unique: int = 0, pairs: int = 0
) -> StepRecord:
    times = dict.fromkeys(("start_s", "schedule_s", "build_s", "forward_s", "sample_s", "finish_s"), 0.0)
    counts = dict.fromkeys(
        ("num_finished", "num_preempted", "num_running", "num_waiting", "num_blocks_used"), 0
    )
    return StepRecord(
        **times,
        **counts,
        num_decode_tokens=decode,
        num_prefill_tokens=prefill,
        num_sampled=sampled,
        context_tokens=context,
        unique_context_tokens=unique,
        num_query_keys=pairs,
    )


def test_a_step_of_few_tokens_is_bound_by_reading_weights_and_keys() -> None:
    floor = estimate_step(
        CONFIG, RATES, BFLOAT16, build_step(decode=1, sampled=1, context=100, unique=100, pairs=100)
    )
    assert floor.linear_s == pytest.approx(2 * NUM_LAYER_WEIGHTS * 2 / 1e9)
    assert floor.head_s == pytest.approx(64 * 1000 * 2 / 1e9)
    assert floor.attention_s == pytest.approx(2 * 2 * 2 * 16 * 2 * 100 / 1e9)
    assert floor.total_s == pytest.approx(sum(floor))
    packed = estimate_step(
        CONFIG, RATES, StoredBits(5.0, 8.5, 8), build_step(decode=1, sampled=1, context=100, unique=100)
    )
    assert packed.linear_s == pytest.approx(floor.linear_s * 5 / 16)
    assert packed.head_s == pytest.approx(floor.head_s * 8.5 / 16)
    assert packed.attention_s == pytest.approx(floor.attention_s / 2)


def test_a_step_of_many_tokens_is_bound_by_multiplying() -> None:
    step = build_step(prefill=300, sampled=2, context=300, unique=300, pairs=45_150)
    floor = estimate_step(CONFIG, SLOW_FLOPS, FLOAT32, step)
    assert floor.linear_s == pytest.approx(count_linear_flops(CONFIG, 300) / 1e9)
    assert floor.head_s == pytest.approx(2 * 2 * 64 * 1000 / 1e9)
    assert floor.attention_s == pytest.approx(4 * 2 * 4 * 16 * 45_150 / 1e9)


def test_keys_that_sequences_share_are_read_once() -> None:
    alone = estimate_step(CONFIG, RATES, BFLOAT16, build_step(decode=8, context=800, unique=800, pairs=800))
    shared = estimate_step(CONFIG, RATES, BFLOAT16, build_step(decode=8, context=800, unique=200, pairs=800))
    assert shared.attention_s == pytest.approx(alone.attention_s / 4)


def test_a_step_that_samples_nothing_needs_no_head() -> None:
    assert estimate_step(CONFIG, RATES, BFLOAT16, build_step(prefill=64)).head_s == 0.0


def test_the_floor_of_a_run_is_that_of_its_steps() -> None:
    steps = [build_step(prefill=30, context=30, pairs=465), build_step(decode=3, context=90, pairs=90)]
    floors = [estimate_step(CONFIG, RATES, BFLOAT16, step) for step in steps]
    assert estimate_run(CONFIG, RATES, BFLOAT16, steps).total_s == pytest.approx(
        sum(f.total_s for f in floors)
    )
    assert estimate_run(CONFIG, RATES, BFLOAT16, []).total_s == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_calibration_gives_rates_that_a_machine_can_have(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.engine.measure.roofline.STREAM_BYTES", 16 << 20)
    monkeypatch.setattr("gristmill.engine.measure.roofline.GEMM_SHAPE", (64, 256, 256))
    monkeypatch.setattr("gristmill.engine.measure.roofline.PROBE_S", 0.05)
    rates = calibrate(torch.device("cpu"), dtype)
    assert 1e7 < rates.bytes_per_s < 1e14
    assert 1e7 < rates.flops_per_s < 1e16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_those_that_the_shape_needs(dtype: torch.dtype) -> None:
    weights = dict(random_weights(CONFIG, dtype))
    check_tensors(CONFIG, {name: tuple(tensor.shape) for name, tensor in weights.items()}, "random")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    down = weights["model.layers.1.mlp.down_proj.weight"].float()
    assert down.std().item() == pytest.approx(96**-0.5, rel=0.1)
    assert bool((weights["model.norm.weight"] == 1).all())
    again = dict(random_weights(CONFIG, dtype))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
