"""Linear layers as the engine calls them: of parts, each held by a backend in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Finish = Literal["plain", "silu", "mul", "add"]


class LinearPart(ABC):
    """Some rows of a linear layer's weights as one backend holds them; num_bytes: with scales and padding.

    any_rows: whether each number of rows runs at full speed without having been warmed. has_rows: of take_rows.
    """

    any_rows = True
    has_rows = False
    out_features: int
    in_features: int
    num_weights: int
    num_bytes: int

    @abstractmethod
    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        """f(x W^T + b) in the type of x. x: [num_tokens, in_features]; other: [num_tokens, out_features]."""

    def take_rows(self, ids: Tensor) -> Tensor:
        """Rows of W: [n, in_features] float32. ids: [n] int64."""
        raise AssertionError("these weights are not held as codes")


class Linear:
    """y = x W^T + b by its parts, each for the outputs after those of the one before it.

    Called with `finish`: silu(y), y * other or y + other. x: [num_tokens, in_features]; other, result: [num_tokens,
    out_features].
    """

    def __init__(self, parts: Sequence[LinearPart]) -> None:
        self.parts = tuple(parts)
        self.out_features = sum(part.out_features for part in parts)
        self.in_features = parts[0].in_features
        self.any_rows = all(part.any_rows for part in parts)
        self.num_weights = sum(part.num_weights for part in parts)
        # Whether take_rows works, so that a head's weights are the embeddings too.
        self.has_rows = len(parts) == 1 and parts[0].has_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are held, with their scales and padding."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def bits_per_weight(self) -> float:
        """num_bytes in bits, over the weights."""
        return 8 * self.num_bytes / self.num_weights

    def __call__(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].run(x, finish, other)
        sizes = [part.out_features for part in self.parts]
        others = [None] * len(sizes) if other is None else other.split(sizes, 1)
        pairs = zip(self.parts, others, strict=True)
        return torch.cat([part.run(x, finish, own) for part, own in pairs], 1)

    def take_rows(self, ids: Tensor) -> Tensor:
        """Rows of W: [n, in_features] float32. ids: [n] int64."""
        assert self.has_rows, "these weights are not held as codes"
        return self.parts[0].take_rows(ids)


class GatedPair(LinearPart):
    """silu(x G^T + b) * (x U^T + c) by two linears."""

    def __init__(self, gate: Linear, up: Linear) -> None:
        self.gate, self.up = gate, up
        self.out_features, self.in_features = gate.out_features, gate.in_features
        self.num_weights = gate.num_weights + up.num_weights
        self.num_bytes = gate.num_bytes + up.num_bytes
        self.any_rows = gate.any_rows and up.any_rows

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        """The product of both factors; nothing is fused behind it."""
        return self.up(x, "mul", self.gate(x, "silu"))
