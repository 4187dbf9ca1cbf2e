"""The table of formats: each loads, has the weights of the outside reference, and gives transformers' tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.kernels.quantized import QuantizedTensor
from tests.engine.formats.checkpoint_variants import SIZES, VARIANTS, Variant
from tests.engine.parity import Oracle, generate, load_engine
from tests.engine.tiny_models import build_tiny_model

PROMPTS = [list(range(5, 28)), list(range(60, 130)), [7, 300, 12]]
MAX_TOKENS = 12
TOLERANCE = 1e-6  # of the largest weight of a tensor


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost such small models more than they give."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _greatest_error(path: Path, reference: dict[str, Tensor]) -> float:
    """Over all weights, relative to the largest of each tensor; all linears must be in codes."""
    worst = 0.0
    for name, weight in iterate_weights(load_checkpoint(str(path)), torch.float32):
        assert isinstance(weight, QuantizedTensor) or "_proj.weight" not in name, f"{name} is not in codes"
        found = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        expected = reference[name]
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def _row(variant: Variant, base: Path, model: Any, folder: Path) -> list[str]:
    """loads, matches, tokens agree: `yes`, or what is wrong. model: transformers' of the base; takes other weights."""
    cells: list[str] = []
    path, reference = variant.build(base, folder)
    try:
        engine = load_engine(str(path), num_kv_blocks=32, max_num_batched_tokens=64)
        cells.append("yes")
        error = _greatest_error(path, reference)
        cells.append("yes" if error <= TOLERANCE else f"off by {error:.1e}")
        missing, unexpected = model.load_state_dict(reference, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}  # where it is tied
        Oracle(model).check_equal(PROMPTS, generate(engine, PROMPTS, MAX_TOKENS))
        cells.append("yes")
    except Exception as error:  # the table shows it
        cells.append(f"{type(error).__name__}: {error}".splitlines()[0])
    return cells + [""] * (3 - len(cells))


@pytest.mark.usefixtures("one_thread")
def test_every_format_loads_has_its_references_weights_and_gives_its_tokens(tmp_path: Path) -> None:
    bases, models = {}, {}
    for name in sorted({variant.architecture for variant in VARIANTS}):
        bases[name] = build_tiny_model(tmp_path / name, name, tie_word_embeddings=name == "qwen3", **SIZES)
        models[name] = transformers.AutoModelForCausalLM.from_pretrained(bases[name], dtype=torch.float32)
    table = []
    for index, variant in enumerate(VARIANTS):
        name = variant.architecture
        row = _row(variant, bases[name], models[name], tmp_path / f"variant{index}")
        table.append([variant.name, *row])
    print(f"\n{'format':<50} {'loads':<6} {'matches':<8} tokens agree")
    for name, *cells in table:
        print(f"{name:<50} {cells[0]:<6} {cells[1]:<8} {cells[2]}")
    assert len(table) >= 10
    assert [row for row in table if row[1:] != ["yes"] * 3] == []


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", ["compressed-tensors int4 g64 asymmetric", "fp8 128x128"])
def test_transformers_takes_the_folders_for_the_same_models(name: str, tmp_path: Path) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    base = build_tiny_model(tmp_path / "base", variant.architecture, **SIZES)
    path, reference = variant.build(base, tmp_path / "variant")
    options: dict[str, Any] = {}
    if variant.config["quant_method"] == "compressed-tensors":
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    found = model.state_dict()
    assert set(found) == set(reference)
    for (
        tensor_name,
        expected,
    ) in reference.items():  # the package multiplies in bfloat16, the type of its scales
        error = (found[tensor_name].float() - expected).abs().max() / expected.abs().max()
        assert error <= 2**-8, tensor_name
