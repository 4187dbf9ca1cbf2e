"""What quantize writes, read by the outside: transformers with the compressed-tensors package, and our own loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.quantize.layer import LINEARS
from gristmill.engine.quantize.run import Method, QuantizeOrder, plan_quantize, run_quantize
from gristmill.kernels.quantized import Kind, QuantizedTensor
from tests.engine.tiny_models import build_tiny_model

# A float32 llama, and a bfloat16 qwen3 with tied embeddings.
CASES: list[tuple[str, Kind, Method]] = [
    ("llama", "int4", "rtn"),
    ("llama", "int4", "gptq"),
    ("llama", "int8", "rtn"),
    ("llama", "fp8", "rtn"),
    ("qwen3", "int4", "awq"),
    ("qwen3", "int8", "rtn"),
    ("qwen3", "fp8", "rtn"),
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    llama = build_tiny_model(folder / "llama", "llama")
    qwen3 = build_tiny_model(folder / "qwen3", "qwen3", tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.bfloat16)
    model.save_pretrained(qwen3)
    return {"llama": llama, "qwen3": qwen3}


def _quantize(source: Path, output: Path, kind: Kind, method: Method) -> Path:
    order = QuantizeOrder(str(source), output, kind, method, None, None, 512)
    run_quantize(plan_quantize(order), lambda done, total: None)
    return output


def _float_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of the folder through our loader, in float32; the linear layers' come out of codes."""
    found = {}
    for name, weight in iterate_weights(load_checkpoint(str(folder)), torch.float32):
        is_linear = name.endswith("_proj.weight")
        assert isinstance(weight, QuantizedTensor) == is_linear, name
        found[name] = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return found


def _logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 400, (2, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits.float()


@pytest.mark.parametrize(("architecture", "kind", "method"), CASES)
def test_transformers_computes_the_logits_of_the_codes(
    sources: dict[str, Path], tmp_path: Path, architecture: str, kind: Kind, method: Method
) -> None:
    source = sources[architecture]
    output = _quantize(source, tmp_path / "out", kind, method)
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    original = _logits(plain)
    missing, unexpected = plain.load_state_dict(_float_weights(output), strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    expected = _logits(plain)
    assert 1e-2 * original.std() < (expected - original).abs().max(), "the codes are not the floats"
    outside = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert outside.model.layers[0].mlp.up_proj.quantization_scheme is not None, "it was read as quantized"
    assert (_logits(outside) - expected).abs().max() < 1e-4 * expected.std()


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "int4"), ("qwen3", "fp8")])
def test_all_but_the_linear_layers_stays_as_it_was(
    sources: dict[str, Path], tmp_path: Path, architecture: str, kind: Kind
) -> None:
    source = sources[architecture]
    output = _quantize(source, tmp_path / "out", kind, "rtn")
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for file in set(index.values()):
        with safe_open(output / file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    assert set(found) == set(index)
    with safe_open(source / "model.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if name.split(".layers.")[-1].partition(".")[2].removesuffix(".weight") in LINEARS:
                continue
            before = tensors.get_tensor(name)
            assert found[name].dtype == before.dtype and torch.equal(found[name], before), name
    assert (output / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    section = after.pop("quantization_config")
    assert after == before
    assert section["quant_method"] == "compressed-tensors" and section["ignore"] == ["lm_head"]
