"""FP8 checkpoints: quant_method `fp8` (Qwen, DeepSeek, Mistral, AutoFP8) and ModelOpt's FP8 per tensor.

Codes are float8 e4m3 under the name `weight`. A scale of the file holds for a rectangle of weights: all, a row, a
block. Scales of activations are known and not used: only weights are quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.formats.rules import EVERY_MODULE, HEAD, Rule, tree_pattern, wildcard_pattern
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored, check_scales
from gristmill.engine.errors import ModelRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.quantized import QuantizedTensor

FP8_KEYS = {
    *("quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "dequantize"),
    *("modules_to_not_convert", "ignored_layers", "kv_cache_scheme", "expert_dtype"),
}
MODELOPT_KEYS = {
    *("quant_method", "quant_algo", "exclude_modules", "ignore", "config_groups", "producer"),
    *("kv_cache_quant_algo", "kv_cache_scheme", "group_size"),
}
_NAN_SLICE = 1 << 24  # codes


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """Over how many rows and columns of W one scale holds; None: over all of them."""

    rows: int | None = None
    columns: int | None = None

    @property
    def label(self) -> str:
        """`per tensor`, `per row`, `g128` or `128x128`."""
        if self.rows is None:
            return "per tensor"
        if self.rows == 1:
            return "per row" if self.columns is None else f"g{self.columns}"
        return f"{self.rows}x{self.columns}"

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Of the scales in the file; () for one number."""
        if self.rows is None:
            return ()
        return -(-num_rows // self.rows), -(-num_columns // (self.columns or num_columns))

    def group_size(self, num_columns: int) -> int:
        """Columns of a group in the canonical tensor."""
        return min(self.columns or num_columns, num_columns)

    def to_groups(self, scales: Tensor, num_rows: int) -> Tensor:
        """The file's scales as [num_groups, num_rows], of the same type."""
        rows = self.rows or num_rows
        table = scales.reshape(-(-num_rows // rows), -1)
        return table.repeat_interleave(rows, 0)[:num_rows].T.contiguous()

    def canonical(
        self, name: str, scales: Tensor, num_rows: int, zeros: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(scales, offsets) of the canonical tensor from those of the file, called `name`, and its zero points.

        Raises ModelRefused for scales that are not finite.
        """
        from gristmill.kernels.quantized import narrow_scales

        groups = self.to_groups(check_scales(name, scales), num_rows)
        if zeros is None:
            return narrow_scales(groups, None)
        return narrow_scales(groups, -groups.float() * self.to_groups(zeros, num_rows).float())


@dataclass(frozen=True, slots=True)
class FP8Scheme:
    """W = code * scale. method: the format's name, for people."""

    method: str
    layout: ScaleLayout
    scale_name: str = "weight_scale"
    unused_scale_name: str = "input_scale"

    @property
    def label(self) -> str:
        """`compressed-tensors fp8 per row`; the method fp8 is not said twice."""
        return " ".join(dict.fromkeys([self.method, "fp8", self.layout.label]))

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """Codes [N, K] and scales; a scale of the activations may be there."""
        return {
            "weight": Stored((num_rows, num_columns), ("F8_E4M3",)),
            self.scale_name: Stored(self.layout.shape(num_rows, num_columns), FLOAT_TYPES),
            self.unused_scale_name: Stored((), FLOAT_TYPES, is_optional=True),
        }

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Raises ModelRefused for codes that are NaN and scales that are not finite."""
        from gristmill.kernels.quantized import QuantizedTensor

        codes = check_codes(f"{name}.weight", tensors["weight"])
        scales = tensors[self.scale_name]
        groups, _ = self.layout.canonical(f"{name}.{self.scale_name}", scales, codes.shape[0])
        return QuantizedTensor("fp8", codes, groups, self.layout.group_size(codes.shape[1]))


def check_codes(name: str, codes: Tensor) -> Tensor:
    """The same tensor. Raises ModelRefused where a code is NaN (0x7F or 0xFF; e4m3fn has no infinity)."""
    import torch

    for part in codes.reshape(-1).view(torch.uint8).split(_NAN_SLICE):
        if ((part & 127) == 127).any():
            raise ModelRefused(
                f"tensor {name} holds codes that are NaN; the checkpoint is damaged, get it again"
            )
    return codes


def load_fp8_rules(section: ConfigSection) -> tuple[Rule, ...]:
    """Rules of quant_method `fp8`. The head is never quantized, nor what a skip list names.

    Without weight_block_size the file is of AutoFP8: one scale a tensor, `weight_scale`; transformers writes the key
    as null for the same and calls the scale `weight_scale_inv`, as it calls the scales of blocks.
    """
    section.refuse_unknown(FP8_KEYS)
    section.one_of("fmt", ("e4m3",), "e4m3")
    section.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    section.one_of("scale_fmt", ("float", "ue8m0"), "float")
    if "weight_block_size" not in section.values:
        scheme = FP8Scheme("fp8", ScaleLayout())
    elif section.values["weight_block_size"] is None:
        scheme = FP8Scheme("fp8", ScaleLayout(), "weight_scale_inv", "activation_scale")
    else:
        block = ScaleLayout(*section.sizes("weight_block_size"))
        scheme = FP8Scheme("fp8", block, "weight_scale_inv", "activation_scale")
    skipped = [
        Rule(tree_pattern(section.place, name.removeprefix("re:")))
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in section.strings(key) or ()
    ]
    return (Rule(HEAD), *skipped, Rule(EVERY_MODULE, scheme))


def load_modelopt_rules(section: ConfigSection) -> tuple[Rule, ...]:
    """Rules of ModelOpt's FP8, one scale a tensor. Its tools leave the head alone unless a list says otherwise."""
    section.one_of("quant_algo", ("FP8",))
    section.refuse_unknown(MODELOPT_KEYS)
    key = "exclude_modules" if "exclude_modules" in section.values else "ignore"
    excluded = section.strings(key)
    skipped = [Rule(wildcard_pattern(name)) for name in (("lm_head",) if excluded is None else excluded)]
    return (*skipped, Rule(EVERY_MODULE, FP8Scheme("modelopt", ScaleLayout())))
