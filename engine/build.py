"""From a model's path and options to an engine that is ready to step: memory, budget, kernels, weights.

Everything that is chosen from the machine is chosen here, once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import prod
from typing import cast

import torch

from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.checkpoint.opening import Checkpoint, check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.checkpoint.weights import Weight, dequantized, iterate_weights, load_part, quantized
from gristmill.engine.config import BLOCK_SIZE, EngineOptions, ModelConfig
from gristmill.engine.engine import Engine
from gristmill.engine.errors import ModelRefused
from gristmill.engine.memory import available_bytes
from gristmill.engine.model.decoder import Model
from gristmill.engine.model.kv_scales import calibrate_kv_scales, is_kv_scale, to_kv_scales
from gristmill.engine.model.runner import ModelRunner
from gristmill.engine.quantize.rtn import default_group_size, quantize_rtn
from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import Tokenizer, load_tokenizer
from gristmill.kernels.cpu.features import CAPS, cap_level, detect_level, has_level
from gristmill.kernels.cpu.library import CpuKernels, load_cpu_kernels
from gristmill.kernels.linear import can_pack
from gristmill.kernels.ops import KVCache, KVScales
from gristmill.kernels.quantized import Kind

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 1024  # of a step: on CPUs more gains nothing
MIN_NUM_BATCHED_TOKENS = 64
MAX_STEP_S = 10.0  # a slow model takes smaller steps: the worker hears of the engine between them
MAX_MEMORY_SHARE = 0.4  # of what is free, for the KV cache; memory is taken when blocks are first used
MAX_CODES_SEQS = 8  # up to so many rows at once, codes are faster than bfloat16: they are fewer bytes
MAX_UNPACKED_SHARE = 0.3  # of what is free, for weights that could stay in codes


def build_engine(model: str, options: EngineOptions) -> Engine:
    """Loads the model at a path and returns an engine that is ready to step. Raises ModelRefused."""
    started = time.monotonic()
    checkpoint = load_checkpoint(model)
    dtype: torch.dtype = getattr(torch, resolve_dtype(options.dtype))
    tokenizer = load_tokenizer(model)
    check_quantization(checkpoint, options.quantization)
    if unpacks_codes(checkpoint, dtype, options):
        options = replace(options, quantization="none")
    weights = choose_weights(checkpoint.config, iterate_weights(checkpoint, dtype), dtype, options)
    scales = None
    if options.kv_dtype == "fp8":
        found = {name: load_part(source) for name, source in checkpoint.extras.items() if is_kv_scale(name)}
        scales = to_kv_scales(found, checkpoint.config, model)
    return assemble_engine(checkpoint.config, weights, tokenizer, options, model, started, scales)


def unpacks_codes(checkpoint: Checkpoint, dtype: torch.dtype, options: EngineOptions) -> bool:
    """Whether weights in codes are held as bfloat16 all the same: for many rows, on a CPU that multiplies bfloat16.

    Codes are multiplied in float32, which such a CPU does far more slowly; where it has only float32, they stay.
    """
    num_seqs = options.max_num_seqs or MAX_NUM_SEQS
    has_choice = options.quantization == "auto" and checkpoint.is_quantized and dtype == torch.bfloat16
    level = cap_level(detect_level(), _cpu_cap(options))
    if not has_choice or num_seqs <= MAX_CODES_SEQS or not has_level(level, "avx512_bf16"):
        return False
    num_bytes = dtype.itemsize * sum(prod(source.shape) for source in checkpoint.tensors.values())
    free_bytes = int(available_bytes() * MAX_UNPACKED_SHARE)
    if num_bytes > free_bytes:
        logger.info(
            "weights stay in codes: as bfloat16, faster for more than %d rows, they take %d MB, and %d are to be had",
            MAX_CODES_SEQS, num_bytes >> 20, free_bytes >> 20,
        )  # fmt: skip
        return False
    logger.info(
        "weights in codes are held as bfloat16, %d MB, faster for more than %d rows",
        num_bytes >> 20, MAX_CODES_SEQS,
    )  # fmt: skip
    return True


def choose_weights(
    config: ModelConfig, weights: Iterator[tuple[str, Weight]], dtype: torch.dtype, options: EngineOptions
) -> Iterator[tuple[str, Weight]]:
    """The weights as options.quantization wants them. Raises ModelRefused where no group size fits."""
    if options.quantization == "auto":
        return weights
    if options.quantization == "none":
        return dequantized(weights, dtype)
    kind = cast(Kind, options.quantization)
    try:
        group_size = default_group_size(config) if kind == "int4" else None
    except ValueError as error:
        raise ModelRefused(f"--quantization {kind}: {error}") from error
    return quantized(weights, partial(quantize_rtn, kind=kind, group_size=group_size))


def assemble_engine(
    config: ModelConfig,
    weights: Iterable[tuple[str, Weight]],
    tokenizer: Tokenizer,
    options: EngineOptions,
    name: str,
    started_s: float | None = None,
    kv_scales: KVScales | None = None,
) -> Engine:
    """An engine of these weights: pairs of Hugging Face name and weight, as Model takes them.

    started_s: when loading began, on the monotonic clock; now unless given. kv_scales: of an FP8 KV cache; measured
    unless given.
    """
    started_s = time.monotonic() if started_s is None else started_s
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    dtype_name = resolve_dtype(options.dtype)
    dtype: torch.dtype = getattr(torch, dtype_name)
    kernels = load_cpu_kernels(_cpu_cap(options))
    _report_slow_paths(kernels, dtype)
    kv_dtype = torch.float8_e4m3fn if options.kv_dtype == "fp8" else dtype
    num_blocks = num_kv_blocks(config, options, kv_dtype)
    context_size = min(config.context_size, options.max_model_tokens or config.context_size)
    max_request_tokens = min(context_size, num_blocks * BLOCK_SIZE)
    model = Model(config, weights, dtype, max_request_tokens, kernels)
    with torch.inference_mode():
        budget = options.max_num_batched_tokens or token_budget(model)
        model.warm(budget)
    max_num_seqs = min(options.max_num_seqs or MAX_NUM_SEQS, budget)
    if kv_dtype == torch.float8_e4m3fn:
        kv_scales = kv_scales or calibrate_kv_scales(model, tokenizer)
    size = (config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    cache = KVCache(*size, kv_dtype, torch.device("cpu"), kernels, kv_scales)
    info = EngineInfo(
        model=name,
        dtype=dtype_name,
        context_size=context_size,
        max_request_tokens=max_request_tokens,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        load_s=time.monotonic() - started_s,
        device="cpu",
        cpu_kernels=kernels.level,
        linear_bits=model.linear_bits,
        head_bits=model.head.bits_per_weight,
        kv_bits=8 * kv_dtype.itemsize,
    )
    scheduler = Scheduler(
        num_blocks,
        max_num_seqs,
        budget,
        options.enable_prefix_cache,
        max_request_tokens,
        options.static_batches,
    )
    return Engine(ModelRunner(model, cache), scheduler, tokenizer, info, options.record_steps)


def token_budget(model: Model) -> int:
    """The largest power of two whose step is expected to take at most MAX_STEP_S."""
    seconds, budget = model.step_seconds(MIN_NUM_BATCHED_TOKENS), MIN_NUM_BATCHED_TOKENS
    while budget < MAX_NUM_BATCHED_TOKENS and 2 * seconds <= MAX_STEP_S:
        seconds, budget = 2 * seconds, 2 * budget
    return budget


def num_kv_blocks(config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Blocks of the KV cache: as told, else as many as MAX_NUM_SEQS rows can fill, within MAX_MEMORY_SHARE."""
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    block_bytes = BLOCK_SIZE * config.kv_bytes_per_token_f32 * dtype.itemsize // 4
    wanted = options.kv_cache_bytes
    if wanted is None:
        context_size = min(config.context_size, options.max_model_tokens or config.context_size)
        most = (options.max_num_seqs or MAX_NUM_SEQS) * -(-context_size // BLOCK_SIZE) * block_bytes
        wanted = min(most, int(available_bytes() * MAX_MEMORY_SHARE))
    if wanted < 2 * block_bytes:
        raise ModelRefused(
            f"a KV cache of {wanted} bytes holds no two blocks of {block_bytes}; free memory or choose a smaller model"
        )
    return int(wanted // block_bytes)


def _cpu_cap(options: EngineOptions) -> str:
    """The highest instruction set to use: as told, else GRISTMILL_CPU_KERNELS. Raises ModelRefused for a wrong word."""
    cap = options.cpu_kernels
    if cap == "auto":
        cap = os.environ.get("GRISTMILL_CPU_KERNELS") or "auto"
    if cap not in CAPS:
        raise ModelRefused(f"GRISTMILL_CPU_KERNELS={cap!r} is not known; choose one of {', '.join(CAPS)}")
    return cap


def _report_slow_paths(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Says once what this machine, or a cap, keeps from being fast."""
    if kernels.level == "none":
        logger.warning("running on torch's own kernels: steps are slower than with the C++ kernels")
        if not can_pack(dtype):
            logger.warning("no prepacked %s linears on this CPU: steps are several times slower", dtype)
    elif not has_level(kernels.level, "avx512"):
        logger.warning("no AVX512 in use: the AVX2 kernels run, in float32 arithmetic")
