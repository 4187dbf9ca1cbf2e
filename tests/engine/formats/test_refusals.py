"""Quantized checkpoints that are damaged or not what they say: each refused in one line that names the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill.engine.checkpoint.opening import load_checkpoint
from gristmill.engine.checkpoint.weights import iterate_weights
from gristmill.engine.errors import ModelRefused
from tests.engine.formats.checkpoint_variants import SIZES, VARIANTS
from tests.engine.tiny_models import build_tiny_model

UP = "model.layers.1.mlp.up_proj"
# key: (the variant, its codes, its scales)
FORMATS = {
    "awq": ("awq gemm g128", "qweight", "scales"),
    "gptq": ("gptq int4 g64 asym", "qweight", "scales"),
    "packed": ("compressed-tensors int4 g64", "weight_packed", "weight_scale"),
    "int8": ("compressed-tensors int8 per row, dynamic inputs", "weight", "weight_scale"),
    "blocks": ("fp8 128x128", "weight", "weight_scale_inv"),
    "modelopt": ("modelopt fp8", "weight", "weight_scale"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("quantized")
    by_name = {variant.name: variant for variant in VARIANTS}
    found = {}
    for key, (name, _, _) in FORMATS.items():
        plain = base / by_name[name].architecture
        if not plain.exists():
            build_tiny_model(plain, by_name[name].architecture, **SIZES)
        found[key] = by_name[name].build(plain, base / key)[0]
    return found


@pytest.fixture
def damage(folders: dict[str, Path], tmp_path: Path) -> Callable[..., str]:
    def run(key: str, change: Callable[[dict[str, Tensor]], Any] | None = None, **config: Any) -> str:
        """What loading the changed checkpoint is refused with. config: changes its quantization_config."""
        folder = Path(shutil.copytree(folders[key], tmp_path / "changed", dirs_exist_ok=True))
        tensors = load_file(folder / "model.safetensors")
        if change is not None:
            change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
        whole = json.loads((folders[key] / "config.json").read_text())
        whole["quantization_config"] |= config
        (folder / "config.json").write_text(json.dumps(whole))
        with pytest.raises(ModelRefused) as caught:
            list(iterate_weights(load_checkpoint(str(folder)), torch.float32))
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
        return str(caught.value)

    return run


@pytest.mark.parametrize("key", FORMATS)
def test_missing_scales_scales_that_are_not_numbers_and_codes_of_another_shape_are_refused(
    damage: Callable[..., str], key: str
) -> None:
    codes, scale = (f"{UP}.{name}" for name in FORMATS[key][1:])
    assert f"tensor {scale} is missing" in damage(key, lambda tensors: tensors.pop(scale))
    said = damage(key, lambda tensors: tensors[scale].view(-1)[:1].fill_(torch.nan))
    assert f"tensor {scale} holds numbers that are not finite" in said
    said = damage(key, lambda tensors: tensors.update({codes: tensors[codes][:, :-1]}))
    assert f"tensor {codes} is" in said


@pytest.mark.parametrize("key", ["blocks", "modelopt"])
def test_fp8_codes_that_are_not_numbers_are_refused(damage: Callable[..., str], key: str) -> None:
    text = damage(key, lambda tensors: tensors[f"{UP}.weight"].view(torch.uint8)[3, 5].fill_(0x7F))
    assert f"tensor {UP}.weight holds codes that are NaN" in text


def test_codes_of_another_type_are_refused(damage: Callable[..., str]) -> None:
    name = f"{UP}.weight"
    text = damage("modelopt", lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e5m2)}))
    assert f"tensor {name} is F8_E5M2" in text


def test_a_module_that_should_be_quantized_and_is_not_is_refused(damage: Callable[..., str]) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = torch.zeros(256, 128)

    assert f"{UP}.weight_packed is missing" in damage("packed", change)


@pytest.mark.parametrize("key", ["awq", "gptq", "packed"])
def test_groups_that_do_not_divide_the_columns_are_refused(
    damage: Callable[..., str], folders: dict[str, Path], key: str
) -> None:
    config = json.loads((folders[key] / "config.json").read_text())["quantization_config"]
    of_weights = config["config_groups"]["group_0"]["weights"] if key == "packed" else config
    of_weights["group_size"] = 96
    said = damage(key, **config)
    assert "group size 96 does not divide its 128 columns" in said and "model.layers.0." in said


def test_a_truncated_shard_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["packed"], tmp_path / "short"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ModelRefused, match=r"truncated: its tensors end at byte \d+"):
        load_checkpoint(str(folder))


def test_quantized_weights_as_pickle_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["gptq"], tmp_path / "pickled"))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-128g.bin")
    with pytest.raises(ModelRefused, match=r"only as pickle \(gptq_model-4bit-128g\.bin\)"):
        load_checkpoint(str(folder))
