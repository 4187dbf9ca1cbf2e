"""compressed-tensors: whole-number weights, packed into int32 words (pack-quantized) or one a byte (int-quantized).

What its config.json says is read by compressed_config.py; its FP8 weights are fp8.FP8Scheme. Activations stay
unquantized on the CPU, so their scales are known and not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gristmill.engine.checkpoint.formats.fp8 import ScaleLayout
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored, check_group_size
from gristmill.engine.errors import ModelRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.quantized import Kind, QuantizedTensor

UNUSED = {
    "input_scale": Stored((), FLOAT_TYPES, is_optional=True),
    "input_zero_point": Stored((), ("I8", "U8", "I32", *FLOAT_TYPES), is_optional=True),
}
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedScheme:
    """Codes of 4 or 8 bits in int32 words, the first code in the lowest bits; a code is the value plus half its range.

    weight_packed: [N, K * bits / 32] int32; weight_zero_point: the same codes, packed along the rows. With
    has_order weight_g_idx says which group a column is in; the codes lie in the columns' own order.
    """

    num_bits: int
    layout: ScaleLayout
    is_symmetric: bool = True
    has_order: bool = False

    @property
    def label(self) -> str:
        """`compressed-tensors int4 g128`."""
        return f"compressed-tensors int{self.num_bits} {self.layout.label}"

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """Words, scales, the shape of W, and what asymmetric codes and act-order need."""
        _check_groups(self.layout, num_columns)
        if self.num_bits == 4 and num_columns % 2:
            raise ValueError(f"int4 needs an even number of columns, not {num_columns}; quantize it to int8")
        scales = self.layout.shape(num_rows, num_columns)
        found = {
            "weight_packed": Stored((num_rows, self._words(num_columns)), ("I32",)),
            "weight_scale": Stored(scales, FLOAT_TYPES),
            "weight_shape": Stored((2,), ("I64", "I32")),
        }
        if not self.is_symmetric:
            found["weight_zero_point"] = Stored((self._words(num_rows), scales[1]), ("I32",))
        if self.has_order:
            found["weight_g_idx"] = Stored((num_columns,), ("I32", "I64"))
        return found | UNUSED

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Raises ModelRefused for a shape that the words can't have, bad scales and a bad column order."""
        from gristmill.engine.checkpoint.formats.packed_words import sort_columns, take_columns, unpack_words
        from gristmill.kernels.quantized import QuantizedTensor

        packed = tensors["weight_packed"]
        num_rows, num_columns = self._shape(f"{name}.weight_shape", tensors["weight_shape"], packed)
        group_size = self.layout.group_size(num_columns)
        zeros = columns = None
        if not self.is_symmetric:  # [num_rows, num_groups], as codes of the canonical kind
            zeros = unpack_words(tensors["weight_zero_point"].T, self.num_bits)[:, :num_rows].T
            zeros = zeros if self.num_bits == 4 else zeros - 128
        scales = tensors["weight_scale"]
        groups, offsets = self.layout.canonical(f"{name}.weight_scale", scales, num_rows, zeros)
        if self.has_order:
            columns = sort_columns(f"{name}.weight_g_idx", tensors["weight_g_idx"], group_size, -1)
        codes = take_columns(self._bytes(packed, num_columns), columns)
        kind: Kind = "int4" if self.num_bits == 4 else "int8"
        return QuantizedTensor(kind, codes, groups, group_size, offsets, columns)

    def _words(self, num_codes: int) -> int:
        return -(-num_codes * self.num_bits // _WORD_BITS)

    def _shape(self, name: str, shape: Tensor, packed: Tensor) -> tuple[int, int]:
        num_rows, num_columns = (int(size) for size in shape.tolist())
        if (num_rows, self._words(num_columns)) != tuple(packed.shape) or num_columns < 1:
            raise ModelRefused(
                f"tensor {name} says {[num_rows, num_columns]}, which {list(packed.shape)} words of"
                f" int{self.num_bits} can't hold; the checkpoint is damaged, get it again"
            )
        return num_rows, num_columns

    def _bytes(self, packed: Tensor, num_columns: int) -> Tensor:
        """Canonical codes. Little-endian words hold int4 codes as the canonical bytes do, even column first."""
        import torch

        num_bytes = num_columns * self.num_bits // 8
        codes = packed.contiguous().view(torch.uint8)[:, :num_bytes].contiguous()
        return codes if self.num_bits == 4 else (codes ^ 128).view(torch.int8)


@dataclass(frozen=True, slots=True)
class IntScheme:
    """W = (code - zero point) * scale with codes int8 [N, K], which may use 4 bits only."""

    layout: ScaleLayout
    is_symmetric: bool = True

    @property
    def label(self) -> str:
        """`compressed-tensors int8 per row`."""
        return f"compressed-tensors int8 {self.layout.label}"

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """Codes, scales, and zero points in the shape of the scales where codes are asymmetric."""
        _check_groups(self.layout, num_columns)
        scales = self.layout.shape(num_rows, num_columns)
        found = {
            "weight": Stored((num_rows, num_columns), ("I8",)),
            "weight_scale": Stored(scales, FLOAT_TYPES),
        }
        if not self.is_symmetric:
            found["weight_zero_point"] = Stored(scales, ("I8",))
        return found | UNUSED

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """Raises ModelRefused for scales that are not finite."""
        from gristmill.kernels.quantized import QuantizedTensor

        codes, scales = tensors["weight"], tensors["weight_scale"]
        num_rows, num_columns = codes.shape
        zeros = None if self.is_symmetric else tensors["weight_zero_point"]
        groups, offsets = self.layout.canonical(f"{name}.weight_scale", scales, num_rows, zeros)
        return QuantizedTensor("int8", codes, groups, self.layout.group_size(num_columns), offsets)


def _check_groups(layout: ScaleLayout, num_columns: int) -> None:
    if layout.rows == 1 and layout.columns is not None:
        check_group_size(layout.columns, num_columns)
