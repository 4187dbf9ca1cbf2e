"""From a model's path and options to an engine that is ready to step: memory, budget, kernels, weights.

Everything that is chosen from the machine is chosen here, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.checkpoint.opening import Checkpoint, check_quantization, load_checkpoint, resolve_dtype
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.checkpoint.weights import Weight, dequantized, iterate_weights, load_part, quantized
from gristmill.engine.config import BLOCK_SIZE, EngineOptions, ModelConfig
from gristmill.engine.engine import Engine
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.decoder import Model
from gristmill.engine.model.kv_scales import calibrate_kv_scales, is_kv_scale, to_kv_scales
from gristmill.engine.model.runner import ModelRunner
from gristmill.engine.quantize.rtn import default_group_size, quantize_rtn
from gristmill.engine.request import EngineInfo
from gristmill.engine.text.tokenizer import NullTokenizer, Tokenizer, load_tokenizer
from gristmill.kernels import dispatch
from gristmill.kernels.contract import Backend, KVScales
from gristmill.kernels.quantized import Kind

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 256
MIN_NUM_BATCHED_TOKENS = 64
MAX_STEP_S = 10.0  # a slow model takes smaller steps: the worker hears of the engine between them
MAX_MEMORY_SHARE = 0.4  # of what is free, for the KV cache; memory is taken when blocks are first used
MAX_UNPACKED_SHARE = 0.3  # of what is free, for weights that could stay in codes


def build_engine(model: str, options: EngineOptions) -> Engine:
    """Loads the model at a path and returns an engine that is ready to step. Raises ModelRefused."""
    started = time.monotonic()
    checkpoint = load_checkpoint(model)
    dtype: torch.dtype = getattr(torch, resolve_dtype(options.dtype))
    tokenizer = load_tokenizer(model)
    check_quantization(checkpoint, options.quantization)
    backend = choose_backend(options)
    if unpacks_codes(checkpoint, dtype, options, backend):
        options = replace(options, quantization="none")
    weights = choose_weights(checkpoint.config, iterate_weights(checkpoint, dtype), dtype, options)
    scales = None
    if options.kv_dtype == "fp8":
        found = {name: load_part(source) for name, source in checkpoint.extras.items() if is_kv_scale(name)}
        scales = to_kv_scales(found, checkpoint.config, model)
    parts = ModelParts(checkpoint.config, weights, tokenizer, model, scales, started)
    return assemble_engine(parts, options, backend)


def choose_backend(options: EngineOptions) -> Backend:
    """The backend of the options' device. Raises ModelRefused for a word that is not known."""
    try:
        return dispatch.choose_backend(options.device, options.cpu_kernels)
    except ValueError as error:
        raise ModelRefused(str(error)) from error


def unpacks_codes(
    checkpoint: Checkpoint, dtype: torch.dtype, options: EngineOptions, backend: Backend
) -> bool:
    """Whether weights in codes are held in `dtype` all the same: for more rows than the device is faster with codes."""
    max_rows = backend.max_codes_rows(dtype)
    has_choice = options.quantization == "auto" and checkpoint.is_quantized
    if not has_choice or max_rows is None or (options.max_num_seqs or MAX_NUM_SEQS) <= max_rows:
        return False
    num_bytes = dtype.itemsize * sum(prod(source.shape) for source in checkpoint.tensors.values())
    free_bytes = int(backend.available_bytes() * MAX_UNPACKED_SHARE)
    if num_bytes > free_bytes:
        logger.info(
            "weights stay in codes: as bfloat16, faster for more than %d rows, they take %d MB, and %d are to be had",
            max_rows, num_bytes >> 20, free_bytes >> 20,
        )  # fmt: skip
        return False
    logger.info(
        "weights in codes are held as bfloat16, %d MB, faster for more than %d rows",
        num_bytes >> 20, max_rows,
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


@dataclass(frozen=True, slots=True)
class ModelParts:
    """What an engine is assembled of. weights: pairs of Hugging Face name and weight, as Model takes them.

    kv_scales: of an FP8 KV cache; measured unless given. started_s: when loading began, on the monotonic clock.
    """

    config: ModelConfig
    weights: Iterable[tuple[str, Weight]]
    tokenizer: Tokenizer
    name: str
    kv_scales: KVScales | None = None
    started_s: float = field(default_factory=time.monotonic)


def assemble_engine(parts: ModelParts, options: EngineOptions, backend: Backend) -> Engine:
    """An engine of these parts on the backend's device."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    config, dtype_name = parts.config, resolve_dtype(options.dtype)
    dtype: torch.dtype = getattr(torch, dtype_name)
    backend.report_slow_paths(dtype)
    kv_dtype = torch.float8_e4m3fn if options.kv_dtype == "fp8" else dtype
    num_blocks = num_kv_blocks(config, options, kv_dtype, backend)
    context_size = min(config.context_size, options.max_model_tokens or config.context_size)
    max_request_tokens = min(context_size, num_blocks * BLOCK_SIZE)
    model = Model(config, parts.weights, dtype, max_request_tokens, backend)
    with torch.inference_mode():
        budget = options.max_num_batched_tokens or token_budget(model)
        model.warm(budget)
    max_num_seqs = min(options.max_num_seqs or MAX_NUM_SEQS, budget)
    kv_scales = parts.kv_scales
    if kv_dtype == torch.float8_e4m3fn:
        kv_scales = kv_scales or calibrate_kv_scales(model, parts.tokenizer)
    cache = backend.kv_cache(model.kv_spec(kv_dtype, kv_scales), num_blocks)
    info = EngineInfo(
        model=parts.name,
        dtype=dtype_name,
        context_size=context_size,
        max_request_tokens=max_request_tokens,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        load_s=time.monotonic() - parts.started_s,
        device=backend.device.type,
        cpu_kernels=backend.instructions,
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
    return Engine(ModelRunner(model, cache), scheduler, parts.tokenizer, info, options.record_steps)


def token_budget(model: Model) -> int:
    """The largest power of two whose step is expected to take at most MAX_STEP_S."""
    seconds, budget = model.step_seconds(MIN_NUM_BATCHED_TOKENS), MIN_NUM_BATCHED_TOKENS
    while budget < model.backend.max_step_tokens and 2 * seconds <= MAX_STEP_S:
        seconds, budget = 2 * seconds, 2 * budget
    return budget


def num_kv_blocks(config: ModelConfig, options: EngineOptions, dtype: torch.dtype, backend: Backend) -> int:
    """Blocks of the KV cache: as told, else as many as MAX_NUM_SEQS rows can fill, within MAX_MEMORY_SHARE."""
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    block_bytes = BLOCK_SIZE * config.kv_bytes_per_token_f32 * dtype.itemsize // 4
    wanted = options.kv_cache_bytes
    if wanted is None:
        context_size = min(config.context_size, options.max_model_tokens or config.context_size)
        most = (options.max_num_seqs or MAX_NUM_SEQS) * -(-context_size // BLOCK_SIZE) * block_bytes
        wanted = min(most, int(backend.available_bytes() * MAX_MEMORY_SHARE))
    if wanted < 2 * block_bytes:
        raise ModelRefused(
            f"a KV cache of {wanted} bytes holds no two blocks of {block_bytes}; free memory or choose a smaller model"
        )
    return int(wanted // block_bytes)


def build_random_engine(config: ModelConfig, options: EngineOptions, name: str) -> Engine:
    """An engine of the shape, ready to step; its tokenizer is the one of bytes."""
    dtype: torch.dtype = getattr(torch, resolve_dtype(options.dtype))
    weights = choose_weights(config, random_weights(config, dtype), dtype, options)
    return assemble_engine(
        ModelParts(config, weights, NullTokenizer(), name), options, choose_backend(options)
    )


def random_weights(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Pairs (Hugging Face name, tensor) of every tensor that the model reads, made one at a time.

    Norms are ones; a matrix is scaled by its inputs, so that activations neither vanish nor overflow.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in expected_shapes(config).items():
        if name.endswith(("norm.weight", ".bias")):
            fill = 0.0 if name.endswith(".bias") else 1.0
            yield name, torch.full(shape, fill, dtype=dtype)
            continue
        tensor = torch.empty(shape, dtype=dtype)
        yield name, tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)
