"""One finding of doctor, and the sizes that the finding about a model carries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartSize:
    """What the tensors of one type in one part of a model take once they are loaded.

    part: embedding, attention, mlp, head or norms; type: as in the file; loaded_as: the type in memory, the same word
    where nothing is converted. is_shared: the bytes are those of another part and not counted again.
    """

    part: str
    type: str
    loaded_as: str
    num_weights: int
    num_bytes: int
    is_shared: bool = False

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Where a model's memory goes."""

    parts: tuple[PartSize, ...]
    kv_dtype: str
    kv_bytes_per_token: int

    @property
    def num_bytes(self) -> int:
        """Of all weights, shared ones once."""
        return sum(part.num_bytes for part in self.parts if not part.is_shared)


@dataclass(frozen=True, slots=True)
class Check:
    """state: ok, warn (works, but worse than it could) or fail (a job can't run)."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    size: ModelSize | None = None
