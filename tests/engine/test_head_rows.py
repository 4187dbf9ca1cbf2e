"""For how many rows logits are made at a time: no number of rows is padded beyond it."""

from __future__ import annotations

import pytest
import torch

from gristmill.engine.build import random_weights
from gristmill.engine.config import ModelConfig
from gristmill.engine.model.decoder import Model, max_head_rows
from gristmill.kernels.torch.backend import TorchBackend

VOCAB_SIZES = [1, 96, 32_000, 49_152, 65_024, 128_256, 151_936, 262_144]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_rows_of_the_head_are_padded_to_what_it_takes_at_most(vocab_size: int) -> None:
    limit = max_head_rows(vocab_size)
    assert 64 <= limit <= 256
    assert max(TorchBackend().round_rows(rows) for rows in range(1, limit + 1)) == limit


@pytest.mark.parametrize("vocab_size", [96, 49_152])
def test_torchs_linears_are_warmed_for_every_number_of_rows(vocab_size: int) -> None:
    config = ModelConfig("llama", vocab_size, 32, 32, 1, 2, 2, 16, 64, 1e-5, 1e4)
    model = Model(config, random_weights(config, torch.float32), torch.float32, 64, TorchBackend())
    assert not model.head.any_rows
    with torch.inference_mode():
        model.warm(300)
        logits = model.logits(torch.zeros(model.max_head_rows, 32))
    assert logits.shape == (model.max_head_rows, vocab_size)
