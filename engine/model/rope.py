"""Tables of rotary position embeddings, with the scalings that models are shipped with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gristmill.engine.config import ModelConfig, RopeScaling, yarn_magnitude
from gristmill.kernels.contract import RopeTables


def build_rope_tables(config: ModelConfig, num_positions: int) -> RopeTables:
    """Cos and sin of every position's angles: [num_positions, head_dim / 2] float32."""
    frequencies, scale = _frequencies(config)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return RopeTables(angles.cos() * scale, angles.sin() * scale)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    assert scaling.kind == "yarn", f"rope scaling {scaling.kind!r} passed the checkpoint's check"
    return _yarn(plain, scaling, config)


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a ramp between (Llama 3.1, section on long context)."""
    wavelengths = 2 * math.pi / plain
    smooth = (s.original_context_size / wavelengths - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / s.factor + smooth * plain


def _yarn(plain: Tensor, s: RopeScaling, config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): interpolates dimensions that turn less than beta_slow times."""
    dim, base = config.head_dim, config.rope_theta

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(s.original_context_size / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension_of(s.beta_fast)), 0)
    high = min(math.ceil(dimension_of(s.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    attention = s.attention_factor if s.attention_factor is not None else yarn_magnitude(s.factor)
    return plain / s.factor * (1 - keep) + plain * keep, attention
