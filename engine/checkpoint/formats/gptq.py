"""GPTQ checkpoints of AutoGPTQ, GPTQModel and AutoRound: int4 or int8 in groups, words of neighbouring columns.

The two known ways to store zero points and any order of columns are read; other packings are refused by name.
torch is imported by `build` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gristmill.engine.checkpoint.formats.config_section import ConfigSection
from gristmill.engine.checkpoint.formats.scheme import FLOAT_TYPES, Stored, check_group_size, group_label
from gristmill.engine.errors import ModelRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.quantized import QuantizedTensor

ZeroForm = Literal["same", "less_one", "words_less_one"]
_FORMS = ("gptq", "gptq_v2")
_REFUSED = ("is_marlin_format", "dynamic", "adapter", "rotation")  # they change weights or their settings


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """W = (code - zero point) * scale, with the scale and zero point of the column's group, g_idx[column].

    bits: 4 or 8. group_size: columns, -1: all. zeros: how qzeros has them: as they are (format gptq_v2), each less
    one, where 0 becomes the largest (gptq), or less one by a subtraction from whole words, where a 0 borrows from
    its neighbour (gptq, written by GPTQModel). is_symmetric: the configuration's word that all zero points are in
    the middle; None: it does not say. has_order: columns can't be grouped without a g_idx.
    """

    bits: int
    group_size: int
    zeros: ZeroForm = "less_one"
    is_symmetric: bool | None = None
    has_order: bool = False

    @property
    def label(self) -> str:
        """`gptq int4 g128`."""
        return f"gptq int{self.bits} {group_label(self.group_size)}" + " act-order" * self.has_order

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """The tensors of W [num_rows, num_columns]; raises ValueError where they can't hold it."""
        num_groups = num_columns // check_group_size(self.group_size, num_columns)
        per_word = 32 // self.bits
        if num_rows % per_word or num_columns % per_word:
            raise ValueError(
                f"gptq packs {per_word} rows or columns together, which [{num_rows}, {num_columns}] can't be cut"
                " into; quantize the model again without this layer"
            )
        return {
            "qweight": Stored((num_columns // per_word, num_rows), ("I32",)),
            "qzeros": Stored((num_groups, num_rows // per_word), ("I32",)),
            "scales": Stored((num_groups, num_rows), FLOAT_TYPES),
            "g_idx": Stored((num_columns,), ("I32", "I64"), is_optional=not self.has_order),
        }

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """The weight of module `name`; raises ModelRefused, naming a tensor."""
        from gristmill.engine.checkpoint.formats.packed_words import (
            build_from_codes,
            codes_from_words_of_columns,
            sort_columns,
        )

        qweight = tensors["qweight"]
        group_size = check_group_size(self.group_size, len(qweight) * 32 // self.bits)
        columns = None
        if "g_idx" in tensors:
            unset = None if self.has_order else 0
            columns = sort_columns(f"{name}.g_idx", tensors["g_idx"], group_size, unset)
        zeros = self._zero_points(f"{name}.qzeros", tensors["qzeros"])
        codes = codes_from_words_of_columns(qweight, self.bits, columns)
        return build_from_codes(name, self.bits, codes, tensors["scales"], zeros, group_size, columns)

    def _zero_points(self, name: str, qzeros: Tensor) -> Tensor | None:
        """[num_groups, num_rows]; None: all in the middle."""
        from gristmill.engine.checkpoint.formats.packed_words import unpack_words

        largest = (1 << self.bits) - 1
        if self.is_symmetric:
            self._check_middle(name, unpack_words(qzeros, self.bits))
            return None
        if self.zeros == "same":
            return unpack_words(qzeros, self.bits)
        if self.zeros == "words_less_one":  # 0xFFFFFFFF // largest: a 1 in every place
            return unpack_words(qzeros.long() + 0xFFFFFFFF // largest, self.bits)
        return unpack_words(qzeros, self.bits) + 1 & largest

    def _check_middle(self, name: str, stored: Tensor) -> None:
        """Some writers leave symmetric zero points as they are though the format says less one; both are taken."""
        middle = 1 << (self.bits - 1)
        first = int(stored.flatten()[0])
        allowed = (middle,) if self.zeros == "same" else (middle - 1, middle)
        others = stored[stored != first]
        if first in allowed and not len(others):
            return
        found = int(others[0]) if first in allowed else first
        raise ModelRefused(
            f"tensor {name} holds {found}, but where sym is true all are {allowed[0]}; set sym in its"
            " quantization_config to false if the zero points are meant, or quantize it again"
        )


def load_gptq_scheme(path: str, raw: dict[str, Any]) -> GptqScheme:
    """The scheme of a quantization_config with quant_method gptq, read from `path`; raises ModelRefused.

    Which modules it is for is the caller's to find out: `dynamic` must have been taken out.
    """
    section = ConfigSection(path, "quantization_config", raw)
    bits = int(section.one_of("bits", (4, 8)))
    group_size = -1 if raw.get("group_size") == -1 else section.size("group_size")
    form = section.one_of("format", _FORMS, "gptq")
    form = section.one_of("checkpoint_format", _FORMS, form)
    section.one_of("pack_dtype", (None, "int32"))
    section.refuse_set(_REFUSED)
    zeros: ZeroForm = "same"
    if form == "gptq":
        zeros = "words_less_one" if _is_from_gptqmodel(raw) else "less_one"
    is_symmetric = section.one_of("sym", (None, True, False))
    # With static groups, and with one group, act-order changes codes but not which columns are together.
    is_together = group_size == -1 or section.one_of("static_groups", (True, False), False)
    has_order = bool(section.one_of("desc_act", (True, False), False)) and not is_together
    return GptqScheme(bits, group_size, zeros, is_symmetric, has_order)


def _is_from_gptqmodel(raw: dict[str, Any]) -> bool:
    meta = raw.get("meta")
    tools = meta.get("quantizer") if isinstance(meta, dict) else None
    tools = [tools] if isinstance(tools, str) else tools
    return isinstance(tools, list) and any(str(tool).lower().startswith("gptqmodel") for tool in tools)
