"""The decoder's layers one at a time against transformers, and what the observer gathers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.quantize import layer
from gristmill.engine.quantize.layer import InputObserver, LayerRunner
from tests.engine.tiny_models import CONFIG_CLASSES, build_tiny_model


@pytest.mark.parametrize("architecture", CONFIG_CLASSES)
def test_every_layer_computes_what_transformers_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "BATCH_TOKENS", 48)
    biases: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    folder = build_tiny_model(tmp_path / "model", architecture, **biases)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = load_checkpoint(str(folder)).config
    ids = torch.randint(0, 400, (5, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.model(ids, output_hidden_states=True)
        hidden, runner = model.model.embed_tokens(ids), LayerRunner(config, 24)
        state = model.state_dict()
        for index in range(config.num_layers):
            base = f"model.layers.{index}."
            weights = {name.removeprefix(base): t for name, t in state.items() if name.startswith(base)}
            hidden = runner.run(weights, hidden)
            if index + 1 < config.num_layers:
                torch.testing.assert_close(hidden, expected.hidden_states[index + 1])
        torch.testing.assert_close(model.model.norm(hidden), expected.last_hidden_state)


def test_an_observer_has_the_means_over_all_batches() -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    observer = InputObserver()
    observer("a", x[:20])
    observer("a", x[20:])
    gram, mean = observer.means("a")
    torch.testing.assert_close(gram, x.T @ x / 30)
    torch.testing.assert_close(mean, x.abs().mean(0))
