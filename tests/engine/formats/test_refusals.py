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
NAMES = {
    **{"awq": "awq gemm g128", "gptq": "gptq int4 g64 asym", "packed": "compressed-tensors int4 g64"},
    **{
        "int8": "compressed-tensors int8 per row, dynamic inputs",
        "blocks": "fp8 128x128",
        "modelopt": "modelopt fp8",
    },
}
SCALES = {
    **{"awq": "scales", "gptq": "scales", "packed": "weight_scale", "int8": "weight_scale"},
    **{"blocks": "weight_scale_inv", "modelopt": "weight_scale"},
}
CODES = {
    **{"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "int8": "weight"},
    **{"blocks": "weight", "modelopt": "weight"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("quantized")
    by_name = {variant.name: variant for variant in VARIANTS}
    found = {}
    for key, name in NAMES.items():
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


@pytest.mark.parametrize("key", NAMES)
def test_a_missing_scale_is_refused(damage: Callable[..., str], key: str) -> None:
    name = f"{UP}.{SCALES[key]}"
    assert f"tensor {name} is missing" in damage(key, lambda tensors: tensors.pop(name))


@pytest.mark.parametrize("key", [key for key in NAMES if key != "modelopt"])
def test_swapped_codes_are_refused(damage: Callable[..., str], key: str) -> None:
    name = f"{UP}.{CODES[key]}"
    text = damage(key, lambda tensors: tensors.update({name: tensors[name].T}))
    assert f"tensor {name} is" in text


@pytest.mark.parametrize("key", NAMES)
def test_scales_that_are_not_numbers_are_refused(damage: Callable[..., str], key: str) -> None:
    name = f"{UP}.{SCALES[key]}"
    text = damage(key, lambda tensors: tensors[name].view(-1)[:1].fill_(torch.nan))
    assert f"tensor {name} holds numbers that are not finite" in text


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


@pytest.mark.parametrize(("key", "size"), [("awq", 96), ("gptq", 96)])
def test_groups_that_do_not_divide_the_columns_are_refused(
    damage: Callable[..., str], key: str, size: int
) -> None:
    text = damage(key, group_size=size)
    assert f"group size {size} does not divide its 128 columns" in text
    assert "model.layers.0." in text


def test_groups_of_compressed_tensors_that_do_not_divide_are_refused(
    damage: Callable[..., str], folders: dict[str, Path]
) -> None:
    config = json.loads((folders["packed"] / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["weights"]["group_size"] = 96
    assert "group size 96 does not divide its 128 columns" in damage("packed", **config)


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
