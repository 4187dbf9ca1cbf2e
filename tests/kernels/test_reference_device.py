"""A device of the oracle alone runs a model end to end: the contract is all that a new device has to bring."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.kernels import dispatch
from tests.engine.parity import generate, load_engine
from tests.engine.tiny_models import build_tiny_model

SHARED = [(7 * i + 3) % 390 for i in range(70)]
PROMPTS = [[*SHARED, *range(5, 5 + n)] for n in (1, 2, 5, 9, 3, 7)] + [[11, 12, 13], [17]]
OPTIONS = [
    {},
    {"kv_dtype": "fp8"},
    {"quantization": "int4"},
    {"quantization": "int8"},
    {"quantization": "fp8"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options.values()) or "float32")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_device_that_wraps_the_reference_gives_the_same_tokens(
    architecture: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch.DEVICES, "reference", "tests.kernels.reference_device.backend")
    model = str(build_tiny_model(tmp_path / "model", architecture))
    engine = load_engine(model, device="reference", max_num_batched_tokens=48, **options)
    assert engine.info.cpu_kernels == "reference"
    expected = generate(load_engine(model, **options), PROMPTS, 6)
    assert generate(engine, PROMPTS, 6, preempt=True) == expected
