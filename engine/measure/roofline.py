"""How long each step would take if the machine did nothing but read memory and multiply at its measured rates.

A floor of the time, to be held against the time taken. It leaves out activations, launches and everything that is not
a linear layer or attention; a model that fits the CPU's caches can beat it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gristmill.engine.config import ModelConfig
from gristmill.engine.model.decoder import Model
from gristmill.engine.step_trace import StepRecord

STREAM_BYTES = 256 << 20  # larger than any cache
GEMM_SHAPE = (512, 1024, 2048)  # rows, inputs, outputs: 2.1 GFLOP
MAX_LAYER_ROWS = 512
MIN_PROBES, MAX_PROBES, PROBE_S = 3, 20, 0.6


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this machine reaches with the threads that torch has."""

    bytes_per_s: float  # read from memory
    flops_per_s: float  # of a large matrix product


class Floor(NamedTuple):
    """The least seconds of a step, or of many, by what is computed; the phases follow each other."""

    linear_s: float
    attention_s: float
    head_s: float

    @property
    def total_s(self) -> float:
        return self.linear_s + self.attention_s + self.head_s


class StoredBits(NamedTuple):
    """Of a weight of the layers' linears, of one of the head, and of a key or value in the cache."""

    linear: float
    head: float
    kv: float


class Gemm(NamedTuple):
    """One weight matrix."""

    num_inputs: int
    num_outputs: int


def calibrate(device: torch.device, dtype: torch.dtype) -> MachineRates:
    """Measures the device for products of this dtype, bfloat16 or float32; takes a second or two."""
    stream = torch.ones(STREAM_BYTES // 4, dtype=torch.float32, device=device)
    read_s = _best_seconds(lambda: stream.sum())
    num_rows, num_inputs, num_outputs = GEMM_SHAPE
    x = torch.ones(num_rows, num_inputs, dtype=dtype, device=device)
    weight = torch.ones(num_inputs, num_outputs, dtype=dtype, device=device)
    multiply_s = _best_seconds(lambda: x @ weight)
    return MachineRates(STREAM_BYTES / read_s, 2 * num_rows * num_inputs * num_outputs / multiply_s)


def measure_rates(model: Model, max_rows: int) -> MachineRates:
    """The same, but the products are the model's own linear layers, where these are faster than torch's."""
    rates, num_rows = calibrate(model.backend.device, model.dtype), min(MAX_LAYER_ROWS, max_rows)
    with torch.inference_mode():
        seconds = min(model.step_seconds(num_rows) for _ in range(MIN_PROBES))
    own = count_linear_flops(model.config, num_rows) / seconds
    return MachineRates(rates.bytes_per_s, max(rates.flops_per_s, own))


def layer_gemms(config: ModelConfig) -> tuple[Gemm, ...]:
    """The weight matrices of one layer."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        Gemm(config.hidden_size, query + 2 * key),
        Gemm(query, config.hidden_size),
        Gemm(config.hidden_size, 2 * config.intermediate_size),
        Gemm(config.intermediate_size, config.hidden_size),
    )


def count_linear_flops(config: ModelConfig, num_tokens: int) -> int:
    """Floating-point operations of all layers' weight matrices."""
    num_weights = sum(gemm.num_inputs * gemm.num_outputs for gemm in layer_gemms(config))
    return 2 * num_tokens * config.num_layers * num_weights


def estimate_step(config: ModelConfig, rates: MachineRates, bits: StoredBits, step: StepRecord) -> Floor:
    """The floor of one step. A key that several sequences share is read once."""
    num_tokens = step.num_decode_tokens + step.num_prefill_tokens
    kv_token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bits.kv / 8
    kv_bytes = kv_token_bytes * step.unique_context_tokens
    attention_flops = 4 * config.num_layers * config.num_heads * config.head_dim * step.num_query_keys
    linear_s = sum(_gemm_seconds(gemm, num_tokens, rates, bits.linear) for gemm in layer_gemms(config))
    head = Gemm(config.hidden_size, config.vocab_size)
    return Floor(
        linear_s=config.num_layers * linear_s,
        attention_s=max(kv_bytes / rates.bytes_per_s, attention_flops / rates.flops_per_s),
        head_s=_gemm_seconds(head, step.num_sampled, rates, bits.head),
    )


def estimate_run(
    config: ModelConfig, rates: MachineRates, bits: StoredBits, steps: Sequence[StepRecord]
) -> Floor:
    """The floor of many steps."""
    floors = [estimate_step(config, rates, bits, step) for step in steps]
    return Floor(*(sum(column) for column in zip(*floors, strict=True))) if floors else Floor(0.0, 0.0, 0.0)


def _gemm_seconds(gemm: Gemm, num_rows: int, rates: MachineRates, weight_bits: float) -> float:
    if num_rows == 0:
        return 0.0
    num_weights = gemm.num_inputs * gemm.num_outputs
    read_s = num_weights * weight_bits / 8 / rates.bytes_per_s
    return max(read_s, 2 * num_rows * num_weights / rates.flops_per_s)


def _best_seconds(run: Callable[[], object]) -> float:
    """The shortest of repeated runs, the first left out."""
    run()
    best, deadline = float("inf"), time.perf_counter() + PROBE_S
    for index in range(MAX_PROBES):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
        if index + 1 >= MIN_PROBES and time.perf_counter() >= deadline:
            break
    return best
