"""A QuantizedTensor as the tensors that compressed-tensors checkpoints hold, and what config.json says of them.

Layout as the package defines it: https://github.com/vllm-project/compressed-tensors. int4 and int8 are
`pack-quantized`, fp8 `float-quantized`; activations stay floats, so every engine computes with the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.quantized import Kind, QuantizedTensor, narrow_scales

_WORD_BYTES = 4
_INT8_ZERO = 128  # the stored byte of code 0


def to_stored(name: str, tensor: QuantizedTensor, scale_type: torch.dtype) -> dict[str, Tensor]:
    """The tensors of linear layer `name` by full name. scale_type: a type that holds the scales as they are."""
    assert tensor.offsets is None and tensor.columns is None, "symmetric, columns in order"
    scales = tensor.scales.T.contiguous().to(scale_type)
    assert torch.equal(scales.float(), tensor.scales.T.float()), f"{name}: scales beyond {scale_type}"
    stored = {f"{name}.weight_scale": scales}
    if tensor.kind == "fp8":
        return stored | {f"{name}.weight": tensor.codes}
    raw = tensor.codes if tensor.kind == "int4" else tensor.codes.view(torch.uint8) ^ _INT8_ZERO
    padded = functional.pad(raw, (0, -raw.shape[1] % _WORD_BYTES))
    stored[f"{name}.weight_packed"] = padded.view(torch.int32)  # codes from the lowest bits on
    stored[f"{name}.weight_shape"] = torch.tensor(tensor.shape)
    return stored


def from_stored(name: str, stored: Mapping[str, Tensor], kind: Kind) -> QuantizedTensor:
    """The inverse of to_stored."""
    scales, _ = narrow_scales(stored[f"{name}.weight_scale"].T.contiguous(), None)
    if kind == "fp8":
        codes = stored[f"{name}.weight"]
        return QuantizedTensor(kind, codes, scales, codes.shape[1] // len(scales))
    num_columns = int(stored[f"{name}.weight_shape"][1])
    codes = stored[f"{name}.weight_packed"].view(torch.uint8)
    codes = codes[:, : num_columns // 2 if kind == "int4" else num_columns].contiguous()
    if kind == "int8":
        codes = (codes ^ _INT8_ZERO).view(torch.int8)
    return QuantizedTensor(kind, codes, scales, num_columns // len(scales))


def quantization_config(kind: Kind, group_size: int | None) -> dict[str, Any]:
    """config.json's `quantization_config`: every linear layer but the head. group_size None: one scale a row."""
    weights: dict[str, Any] = {
        "num_bits": 4 if kind == "int4" else 8,
        "type": "float" if kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if kind == "fp8" else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
