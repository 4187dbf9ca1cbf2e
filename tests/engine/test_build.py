"""What is chosen from the machine when an engine is built: kernels, and memory for the KV cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.engine.build import num_kv_blocks
from gristmill.engine.config import BLOCK_SIZE, EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.kernels.torch.backend import TorchBackend
from gristmill.kernels.torch.memory import zeros_on_use
from tests.engine.parity import load_engine
from tests.engine.tiny_models import build_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(build_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama"))


def test_the_environment_caps_the_kernels_and_an_option_goes_before_it(tiny, monkeypatch):
    monkeypatch.setenv("GRISTMILL_CPU_KERNELS", "none")
    assert load_engine(tiny).info.cpu_kernels == "none"
    monkeypatch.setenv("GRISTMILL_CPU_KERNELS", "sse9")
    assert load_engine(tiny, cpu_kernels="none").info.cpu_kernels == "none"
    with pytest.raises(ModelRefused, match="sse9.*choose one of auto, amx"):
        load_engine(tiny)


def test_the_cache_takes_its_share_of_free_memory_and_no_more_than_rows_can_fill(tiny, monkeypatch):
    config = load_engine(tiny).runner.model.config
    block_bytes = BLOCK_SIZE * config.kv_bytes_per_token_f32
    backend = TorchBackend()
    monkeypatch.setattr(backend, "available_bytes", lambda: 100 * block_bytes)
    assert num_kv_blocks(config, EngineOptions(), torch.float32, backend) == 40
    assert num_kv_blocks(config, EngineOptions(), torch.bfloat16, backend) == 80
    assert (
        num_kv_blocks(config, EngineOptions(max_num_seqs=2, max_model_tokens=40), torch.float32, backend) == 6
    )
    assert num_kv_blocks(config, EngineOptions(kv_cache_bytes=7 * block_bytes), torch.float32, backend) == 7
    monkeypatch.setattr(backend, "available_bytes", lambda: block_bytes)
    with pytest.raises(ModelRefused, match="holds no two blocks"):
        num_kv_blocks(config, EngineOptions(), torch.float32, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_zero_and_writable_and_take_no_memory_at_first(dtype):
    large = zeros_on_use((1 << 16, 1 << 16), dtype)  # 8 or 16 GiB
    assert large.dtype == dtype and large.shape == (1 << 16, 1 << 16)
    assert large[12345, 6789] == 0
    large[12345, 6789] = 2
    assert large[12345, 6789] == 2 and large[12345, 6788] == 0
    assert np.prod(zeros_on_use((0, 3), dtype).shape) == 0
