"""AWQ: the folded layer computes what it did, and rounding it loses less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.config import ModelConfig
from gristmill.engine.quantize.awq import fold_scales, quantize_awq
from gristmill.engine.quantize.layer import LINEARS, InputObserver, LayerRunner
from gristmill.engine.quantize.rtn import quantize_rtn
from tests.engine.tiny_models import build_tiny_model

Case = tuple[ModelConfig, dict[str, torch.Tensor], torch.Tensor, InputObserver]


def _case(folder: Path, architecture: str, num_kv_heads: int) -> Case:
    """(config, a layer, inputs with a few large channels, what the layer's linears saw of them)."""
    model = build_tiny_model(folder, architecture, num_key_value_heads=num_kv_heads)
    checkpoint = load_checkpoint(str(model))
    base = "model.layers.0."
    weights = {
        name.removeprefix(base): tensor
        for name, tensor in iterate_weights(checkpoint, torch.float32)
        if name.startswith(base) and isinstance(tensor, torch.Tensor)
    }
    weights["input_layernorm.weight"][::9] *= 12
    weights["post_attention_layernorm.weight"][::11] *= 12
    x = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(2))
    observer = InputObserver()
    LayerRunner(checkpoint.config, 32).run(weights, x, observer)
    return checkpoint.config, weights, x, observer


@pytest.mark.parametrize(("architecture", "num_kv_heads"), [("llama", 4), ("qwen2", 2), ("qwen3", 1)])
def test_the_folded_layer_computes_the_same(tmp_path: Path, architecture: str, num_kv_heads: int) -> None:
    config, weights, x, observer = _case(tmp_path, architecture, num_kv_heads)
    folded, _ = fold_scales(config, weights, observer, 32, torch.bfloat16)
    assert torch.equal(folded["input_layernorm.weight"], folded["input_layernorm.weight"].bfloat16().float())
    changed = {name for name in weights if not torch.allclose(folded[name], weights[name])}
    assert {f"{name}.weight" for name in LINEARS} <= changed, "every linear layer was scaled"
    expected, found = (LayerRunner(config, 32).run(each, x) for each in (weights, folded))
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_the_scaled_layer_loses_less_than_a_rounded_one(tmp_path: Path) -> None:
    config, weights, x, observer = _case(tmp_path, "llama", 2)
    codes, rest = quantize_awq(config, weights, observer, 32, torch.float32)
    scaled = rest | {f"{name}.weight": codes[name].dequantize() for name in LINEARS}
    rounded = weights | {
        f"{name}.weight": quantize_rtn(weights[f"{name}.weight"], "int4", 32).dequantize() for name in LINEARS
    }
    expected, *found = (LayerRunner(config, 32).run(each, x) for each in (weights, scaled, rounded))
    losses = [float((each - expected).pow(2).mean()) for each in found]
    assert losses[0] < 0.8 * losses[1]
