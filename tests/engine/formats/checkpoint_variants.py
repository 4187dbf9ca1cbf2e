"""Small checkpoints in every quantized format, as folders and files like those that people download; for tests.

The tensors are packed by the formats' own packages, or by packers that share no code with the loaders, and each comes
with the weights that the outside reference reads from it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.formats.packers_compressed import compress, decompress
from tests.engine.formats.packers_int4 import exact_weight, pack_awq_tensors, pack_gptq_tensors
from tests.engine.tiny_models import build_tiny_gguf

Packed = tuple[dict[str, Tensor], Tensor]  # a module's tensors, and its weight as the reference reads it
SIZES: dict[str, int] = {
    **{"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Variant:
    """One checkpoint. pack: of a linear layer's weight; None: `gguf_type` is the type of a GGUF file."""

    name: str
    architecture: str
    config: dict[str, Any]
    pack: Callable[[Tensor], Packed] | None = None
    gguf_type: str = ""

    def build(self, base: Path, folder: Path) -> tuple[Path, dict[str, Tensor]]:
        """Writes it from an unquantized folder; (path, every weight as the reference reads it)."""
        weights = load_file(base / "model.safetensors")
        if self.pack is None:
            path = build_tiny_gguf(base, folder.with_suffix(".gguf"), self.gguf_type)
            kind = gguf.GGMLQuantizationType[self.gguf_type]
            return path, {name: _through_gguf(tensor, kind) for name, tensor in weights.items()}
        shutil.copytree(base, folder)
        tensors, reference = {}, {}
        for name, weight in weights.items():
            if "_proj.weight" not in name:
                tensors[name] = reference[name] = weight
                continue
            packed, reference[name] = self.pack(weight)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in packed.items()}
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": self.config}))
        return folder, reference


def _through_gguf(tensor: Tensor, kind: gguf.GGMLQuantizationType) -> Tensor:
    if tensor.dim() == 1:
        return tensor
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))


def _compressed(name: str, storage: str, inputs: dict[str, Any] | None = None, **weights: Any) -> Variant:
    """The package packs the weights and writes the configuration."""
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=activations
    )
    group = {"config_groups": {"group_0": scheme}, "format": storage, "ignore": ["lm_head"]}
    config = QuantizationConfig(**group, quantization_status="compressed").model_dump(mode="json")
    is_static = inputs is not None and not inputs.get("dynamic", False)

    def pack(weight: Tensor) -> Packed:
        tensors = compress(weight, storage, scheme, torch.bfloat16)
        reference = decompress(tensors, storage, scheme)
        return tensors | ({"input_scale": torch.tensor([0.02])} if is_static else {}), reference

    return Variant(f"compressed-tensors {name}", "llama", config, pack)


def _random_codes(weight: Tensor, bits: int, size: int) -> tuple[Any, Any, Any]:
    """(codes, zero points, float16 scales) that make weights about as large as those of the model."""
    num_rows, num_columns = weight.shape
    generator = np.random.default_rng(int(weight.abs().sum() * 1000))
    groups = (num_columns // size, num_rows)
    codes = generator.integers(0, 1 << bits, (num_rows, num_columns))
    zeros = generator.integers((1 << bits) // 4, 3 * (1 << bits) // 4, groups)
    scales = (generator.random(groups) + 0.5) * float(weight.std()) * 3.5 / (1 << bits)
    return codes, zeros, scales.astype(np.float16)


def _awq(size: int, is_symmetric: bool = False) -> Variant:
    def pack(weight: Tensor) -> Packed:
        codes, zeros, scales = _random_codes(weight, 4, size)
        zeros = np.full_like(zeros, 8) if is_symmetric else zeros
        tensors = {k: torch.from_numpy(v) for k, v in pack_awq_tensors(codes, zeros).items()}
        tensors["scales"] = torch.from_numpy(scales)
        groups = np.arange(weight.shape[1]) // size
        exact = exact_weight(codes, zeros, scales.astype(np.float64), groups)
        return tensors, torch.from_numpy(exact).float()

    name = f"awq gemm g{size}" + (" symmetric" if is_symmetric else "")
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    return Variant(name, "qwen2", config | {"zero_point": not is_symmetric}, pack)


def _gptq(bits: int, size: int, form: str, is_symmetric: bool, has_order: bool = False) -> Variant:
    """form: less_one (format gptq) or same (format gptq_v2)."""

    def pack(weight: Tensor) -> Packed:
        num_columns = weight.shape[1]
        width = num_columns if size == -1 else size
        codes, zeros, scales = _random_codes(weight, bits, width)
        zeros = np.full_like(zeros, 1 << (bits - 1)) if is_symmetric else zeros
        groups = np.arange(num_columns) // width
        if has_order:
            groups = np.random.default_rng(num_columns).permutation(groups)
        tensors = {k: torch.from_numpy(v) for k, v in pack_gptq_tensors(codes, zeros, bits, form).items()}
        tensors |= {"scales": torch.from_numpy(scales), "g_idx": torch.from_numpy(groups.astype(np.int32))}
        exact = exact_weight(codes, zeros, scales.astype(np.float64), groups)
        return tensors, torch.from_numpy(exact).float()

    version = "gptq" if form == "less_one" else "gptq_v2"
    words = [
        version,
        f"int{bits}",
        "per row" if size == -1 else f"g{size}",
        "sym" if is_symmetric else "asym",
    ]
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": is_symmetric}
    config |= {"checkpoint_format": version, "desc_act": has_order, "true_sequential": True}
    return Variant(" ".join(words + ["desc_act"] * has_order), "qwen2", config, pack)


def _pack_blocks(weight: Tensor) -> Packed:
    """FP8 in squares of 128, the reference being the package's dequantizer of such checkpoints."""
    num_rows, num_columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -num_columns % 128, 0, -num_rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [R, 128, C, 128]
    scales = blocks.abs().amax((1, 3)) / 448
    rows, columns = torch.arange(num_rows) // 128, torch.arange(num_columns) // 128
    codes = (weight / scales[rows][:, columns]).to(torch.float8_e4m3fn)
    exact = FP8BlockDequantizer(dtype=torch.float32)._create_dequantized_weight(codes, scales)
    return {"weight": codes, "weight_scale_inv": scales}, exact


def _pack_tensor(weight: Tensor, names: tuple[str, ...]) -> Packed:
    """FP8 with one scale; names: of the scale, and of the scale of the activations."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes} | dict.fromkeys(names, scale)
    return {name: tensor.clone() for name, tensor in tensors.items()}, codes.float() * scale


BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_FP8 = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": None}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int"}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
G64: dict[str, Any] = {"strategy": "group", "group_size": 64}
ROW: dict[str, Any] = {"strategy": "channel"}
TOKENS: dict[str, Any] = {"strategy": "token", "dynamic": True}
VARIANTS = [
    _awq(128),
    _awq(64, is_symmetric=True),
    _gptq(4, 128, "less_one", is_symmetric=True),
    _gptq(4, 64, "less_one", is_symmetric=False),
    _gptq(4, 64, "same", is_symmetric=False),
    _gptq(4, 32, "less_one", is_symmetric=True, has_order=True),
    _gptq(4, -1, "less_one", is_symmetric=True),
    _gptq(8, 64, "less_one", is_symmetric=True),
    _compressed("int4 g64", "pack-quantized", **INT4, **G64),
    _compressed("int4 g64 asymmetric", "pack-quantized", symmetric=False, **INT4, **G64),
    _compressed("int4 per row", "pack-quantized", **INT4, **ROW),
    _compressed("int8 per row, dynamic inputs", "int-quantized", INT8 | TOKENS, **INT8, **ROW),
    _compressed("fp8 per row, dynamic inputs", "float-quantized", FP8 | TOKENS, **FP8, **ROW),
    _compressed("fp8 per tensor, static inputs", "float-quantized", FP8, strategy="tensor", **FP8),
    Variant("fp8 128x128", "qwen3", BLOCKS, _pack_blocks),
    Variant(
        "fp8 per tensor", "llama", AUTO_FP8, partial(_pack_tensor, names=("weight_scale", "input_scale"))
    ),
    Variant("modelopt fp8", "qwen3", MODELOPT, partial(_pack_tensor, names=("weight_scale", "input_scale"))),
    *(Variant(f"gguf {kind}", "llama", {}, gguf_type=kind) for kind in ("Q4_0", "Q4_1", "Q8_0")),
]
