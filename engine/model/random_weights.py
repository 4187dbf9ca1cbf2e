"""Random weights of a model's shape, for measuring how fast a shape runs; their outputs mean nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gristmill.engine.build import ModelParts, assemble_engine, choose_backend, choose_weights
from gristmill.engine.checkpoint.opening import resolve_dtype
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.config import EngineOptions, ModelConfig
from gristmill.engine.engine import Engine
from gristmill.engine.text.null_tokenizer import NullTokenizer


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
