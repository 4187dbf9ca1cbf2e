"""What a checkpoint format says of one quantized linear layer: the tensors it stores, and how they become one.

A Scheme knows the layout of one module's tensors and nothing of files, names of layers or the model. Headers are
checked against `stored` before any data is read, without torch: modules of schemes import it inside `build` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gristmill.engine.errors import ModelRefused

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.quantized import QuantizedTensor


FLOAT_TYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor that a module has in the file. types: the safetensors names of its possible types."""

    shape: tuple[int, ...]
    types: tuple[str, ...]
    is_optional: bool = False


class Scheme(Protocol):
    """How the linear layers of a checkpoint, or some of them, are stored. Implementations are frozen dataclasses."""

    @property
    def label(self) -> str:
        """What a person calls it: `awq int4 g128`."""
        ...

    def stored(self, num_rows: int, num_columns: int) -> dict[str, Stored]:
        """The tensors in place of `weight` for W [num_rows, num_columns], by the last part of their names.

        Raises ValueError, with the remedy, where the format can't hold such a matrix.
        """
        ...

    def build(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedTensor:
        """The weight of module `name` from the tensors of `stored` that exist. Raises ModelRefused, naming a tensor."""
        ...


def check_scales(name: str, scales: Tensor) -> Tensor:
    """The same tensor. Raises ModelRefused where a number is not finite; name: of the tensor in the file."""
    if not scales.float().isfinite().all():
        raise ModelRefused(
            f"tensor {name} holds numbers that are not finite; the checkpoint is damaged, get it again"
        )
    return scales


def group_label(group_size: int) -> str:
    """`g128`; -1: all columns."""
    return "per row" if group_size == -1 else f"g{group_size}"


def check_group_size(group_size: int, num_columns: int) -> int:
    """The columns of a group; -1 is all. Raises ValueError where groups don't divide the columns."""
    size = num_columns if group_size == -1 else group_size
    if size < 1 or num_columns % size:
        raise ValueError(
            f"group size {group_size} does not divide its {num_columns} columns; quantize it again"
        )
    return size
