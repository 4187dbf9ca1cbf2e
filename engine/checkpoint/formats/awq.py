"""AWQ checkpoints as AutoAWQ packs them for its "gemm" kernels: int4 in groups, eight rows of W to a 32-bit word.

Other packings are refused by name. torch is imported by `build` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored, check_group_size, group_label
from gristmill.engine.errors import ModelRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.quantized import QuantizedTensor

ROW_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight rows is in its bits 0 to 3, 4 to 7, ...
_BITS = 4
_ROWS_PER_WORD = 32 // _BITS
_REFUSED = ("lm_head", "dynamic", "adapter", "rotation")  # they change weights, or which ones are quantized


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """W = (code - zero point) * scale. A word of qweight has one column of eight rows of W, in ROW_ORDER.

    group_size: columns, -1: all. has_zeros False: every zero point is 8, and qzeros, if stored, must agree.
    """

    group_size: int
    has_zeros: bool = True

    @property
    def label(self) -> str:
        """`awq int4 g128`."""
        return f"awq int4 {group_label(self.group_size)}"

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """The tensors of W [num_rows, num_columns]; raises ValueError where they can't hold it."""
        num_groups = num_columns // check_group_size(self.group_size, num_columns)
        if num_rows % _ROWS_PER_WORD or num_columns % 2:
            raise ValueError(
                f"awq packs 8 rows and 2 columns together, which [{num_rows}, {num_columns}] can't be cut into;"
                " quantize the model again without this layer"
            )
        num_words = num_rows // _ROWS_PER_WORD
        return {
            "qweight": Stored((num_columns, num_words), ("I32",)),
            "qzeros": Stored((num_groups, num_words), ("I32",), is_optional=not self.has_zeros),
            "scales": Stored((num_groups, num_rows), FLOAT_TYPES),
        }

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """The weight of module `name`; raises ModelRefused, naming a tensor."""
        from gristmill.engine.checkpoint.formats.packed_words import (
            build_from_codes,
            codes_from_words_of_rows,
            unpack_words,
        )

        qweight = tensors["qweight"]
        zeros = None
        if "qzeros" in tensors:
            zeros = unpack_words(tensors["qzeros"], _BITS).unflatten(-1, (-1, _ROWS_PER_WORD))
            # A row's place in the word: the inverse of ROW_ORDER.
            zeros = zeros[..., [ROW_ORDER.index(row) for row in range(_ROWS_PER_WORD)]].flatten(-2)  # [G, N]
        if zeros is not None and not self.has_zeros:
            _check_zeros(f"{name}.qzeros", zeros)
        codes = codes_from_words_of_rows(qweight, ROW_ORDER)
        group_size = check_group_size(self.group_size, len(qweight))
        return build_from_codes(name, _BITS, codes, tensors["scales"], zeros, group_size)


def _check_zeros(name: str, zeros: Tensor) -> None:
    others = zeros[zeros != 8]
    if len(others):
        raise ModelRefused(
            f"tensor {name} has zero point {int(others[0])}, but zero_point false says all are 8;"
            " set zero_point in its quantization_config to true if they are meant, or quantize it again"
        )


def load_awq_scheme(path: str, raw: dict[str, Any]) -> AwqScheme:
    """The scheme of a quantization_config with quant_method awq, read from `path`; raises ModelRefused.

    Which modules it is for is the caller's to find out, but rules that it does not know are refused here.
    """
    names = {"bits": "w_bit", "group_size": "q_group_size"}  # as AutoAWQ's own files have them
    values = {name: raw[old] for name, old in names.items() if old in raw} | raw
    section = ConfigSection(path, "quantization_config", values)
    section.one_of("bits", (_BITS,), _BITS)
    for key in ("version", "checkpoint_format", "format"):
        section.one_of(key, (None, "gemm", "GEMM"))
    section.one_of("pack_dtype", (None, "int32"))
    section.refuse_set(_REFUSED)
    if values.get("backend") == "llm-awq":  # its packing; other backends are kernels
        raise section.refused("backend")
    group_size = -1 if values.get("group_size") == -1 else section.size("group_size", 128)
    return AwqScheme(group_size, bool(section.one_of("zero_point", (True, False), True)))
