"""AWQ (Lin et al., arXiv 2306.00978): channels with large inputs are scaled up before rounding, so they lose less.

The inverse scales go into the layer before (a norm's weight, the rows of v_proj or up_proj), so the result is an
ordinary checkpoint that computes the same but for rounding. Scales are searched as in section 3.2 of the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.engine.config import ModelConfig
from gristmill.engine.quantize.layer import DOWN, GATED, OUTPUT, QKV, InputObserver
from gristmill.engine.quantize.rtn import error_scales, quantize_with, range_scales, round_codes, row_slices
from gristmill.kernels.quantized import QuantizedTensor

_STEPS = 20  # exponents between 0 and 1 that are tried
_MIN_INPUT = 1e-4


def quantize_awq(
    config: ModelConfig,
    weights: dict[str, Tensor],
    observer: InputObserver,
    group_size: int,
    norm_type: torch.dtype,
    scale_type: torch.dtype | None = None,
) -> tuple[dict[str, QuantizedTensor], dict[str, Tensor]]:
    """(int4 codes by linear layer, the layer's other tensors, some of which changed), all by name within the layer.

    weights: of one layer, float32, by name; observer: has seen the inputs of its linear layers. norm_type: what norms
    are stored in: their rounding is made up for.
    """
    folded, grams = fold_scales(config, weights, observer, group_size, norm_type, scale_type)
    codes = {}
    for name, gram in grams.items():
        weight = folded.pop(f"{name}.weight")
        scales = error_scales(weight, "int4", group_size, gram, scale_type)
        codes[name] = quantize_with(weight, scales, "int4")
    return codes, folded


def fold_scales(
    config: ModelConfig,
    weights: dict[str, Tensor],
    observer: InputObserver,
    group_size: int,
    norm_type: torch.dtype,
    scale_type: torch.dtype | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights of a layer that computes the same, the mean of x x^T over its linear layers' inputs by their name).

    Arguments as of quantize_awq.
    """
    folded, grams = dict(weights), {}
    for names in ((OUTPUT,), (DOWN,), QKV, GATED):
        gram, mean = observer.means(names[0])
        weight = torch.cat([folded[f"{name}.weight"] for name in names])
        if names == (OUTPUT,):
            mean = _mean_over_heads(config, mean)
        scales = search_scales(weight, gram, mean, group_size, scale_type)
        if names == (OUTPUT,):
            _divide_rows(folded, QKV[2], _one_per_key_head(config, scales))
        elif names == (DOWN,):
            _divide_rows(folded, GATED[1], scales)
        else:
            norm = "input_layernorm.weight" if names == QKV else "post_attention_layernorm.weight"
            folded[norm], scales = _fold_norm(folded[norm], scales, norm_type)
        for name in names:
            folded[f"{name}.weight"] = folded[f"{name}.weight"] * scales
            grams[name] = gram / torch.outer(scales, scales)
    return folded, grams


def search_scales(
    weight: Tensor, gram: Tensor, mean: Tensor, group_size: int, scale_type: torch.dtype | None = None
) -> Tensor:
    """The factor of each column that loses least when the weight is rounded: [num_columns] float32.

    weight: [num_rows, num_columns] float32; gram, mean: the means of x x^T and of |x| over the inputs x.
    """
    best, best_loss = torch.ones_like(mean), torch.inf
    for step in range(_STEPS):
        scales = mean.clamp(min=_MIN_INPUT) ** (step / _STEPS)
        scales = scales / (scales.max() * scales.min()).sqrt()
        loss = 0.0
        for rows in row_slices(weight):
            error = _rounded(weight[rows] * scales, group_size, scale_type) / scales - weight[rows]
            loss += float(((error @ gram) * error).sum())
        if loss < best_loss:
            best, best_loss = scales, loss
    return best


def _rounded(weight: Tensor, group_size: int, scale_type: torch.dtype | None) -> Tensor:
    scales = range_scales(weight, "int4", group_size, scale_type)[:, :, None]
    groups = weight.view(len(weight), -1, group_size)
    return (round_codes(groups / scales, "int4") * scales).view(weight.shape)


def _fold_norm(norm: Tensor, scales: Tensor, norm_type: torch.dtype) -> tuple[Tensor, Tensor]:
    """(norm / scales as `norm_type` holds it, the scales that this rounded norm stands for)."""
    divided = (norm / scales).to(norm_type).float()
    usable = torch.isfinite(divided) & (divided != 0)
    divided = torch.where(usable, divided, norm)
    return divided, torch.where(usable, norm / divided, 1.0)


def _divide_rows(weights: dict[str, Tensor], name: str, scales: Tensor) -> None:
    weights[f"{name}.weight"] = weights[f"{name}.weight"] / scales[:, None]
    if f"{name}.bias" in weights:
        weights[f"{name}.bias"] = weights[f"{name}.bias"] / scales


def _mean_over_heads(config: ModelConfig, mean: Tensor) -> Tensor:
    """Query heads that share a value head must share their scales."""
    shared = mean.view(config.num_kv_heads, -1, config.head_dim).mean(1, keepdim=True)
    return shared.expand(-1, config.num_heads // config.num_kv_heads, -1).reshape(-1)


def _one_per_key_head(config: ModelConfig, scales: Tensor) -> Tensor:
    """Scales of the output projection's columns as those of v_proj's rows."""
    return scales.view(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)
