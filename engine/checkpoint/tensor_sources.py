"""Where the bytes of a checkpoint's tensors are: one tensor, or the several tensors of one quantized weight.

Imports no torch: it is made of headers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gristmill.engine.checkpoint.formats.scheme import Scheme
from gristmill.engine.checkpoint.weight_names import expected_shapes
from gristmill.engine.config import ModelConfig
from gristmill.engine.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where the bytes of one tensor are. type: a safetensors type or a name of gguf_quants.BLOCK_SHAPES.

    rotary_heads: over how many heads the rows are interleaved and must be put in order; 0: they are in order.
    """

    file: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    type: str
    rotary_heads: int = 0


@dataclass(frozen=True, slots=True)
class QuantizedSource:
    """A weight [num_rows, num_columns] that `scheme` builds from its parts, by the last part of their names."""

    scheme: Scheme
    parts: Mapping[str, TensorSource]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts in the files."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def type(self) -> str:
        """What the format is called."""
        return self.scheme.label


def gather_quantized(
    config: ModelConfig,
    scheme_of: Callable[[str], Scheme | None],
    tensors: Mapping[str, TensorSource | QuantizedSource],
    path: str,
) -> dict[str, TensorSource | QuantizedSource]:
    """The tensors by name, those of a quantized module as one source named MODULE.weight.

    Raises ModelRefused for the first tensor that is missing, of another shape or of another type.
    """
    found = dict(tensors)
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        scheme = scheme_of(module) if module != name and len(shape) == 2 else None
        if scheme is None:
            continue
        try:
            stored = scheme.stored(*shape)
        except ValueError as error:
            raise ModelRefused(f"{path}: {module}, {list(shape)}: {error}") from error
        parts = {}
        for suffix, expected in stored.items():
            part = found.pop(f"{module}.{suffix}", None)
            if part is None and expected.is_optional:
                continue
            if not isinstance(part, TensorSource):
                raise ModelRefused(
                    f"{path}: tensor {module}.{suffix} is missing, which {scheme.label} needs;"
                    " the checkpoint is incomplete, get it again"
                )
            one_number = {part.shape, expected.shape} <= {(), (1,)}
            if not (part.shape == expected.shape or one_number) or part.type not in expected.types:
                raise ModelRefused(
                    f"{path}: tensor {module}.{suffix} is {part.type} {list(part.shape)}, but {scheme.label} says"
                    f" {' or '.join(expected.types)} {list(expected.shape)}; config.json is of other weights"
                )
            parts[suffix] = part
        found[name] = QuantizedSource(scheme, parts, shape)
    return found
