"""Linear layers packed once for the device, and the few batch sizes they are ever called with.

On the CPU oneDNN keeps weights in blocked layouts and generates code for every new number of rows (10 to 50 ms each),
so weights are packed at load and row counts are rounded to a short list that `warm_sizes` runs before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MAX_PACKED_ROWS = 1024  # more rows than this are split: a larger oneDNN shape gains nothing


def round_rows(num_rows: int) -> int:
    """The number of rows a step of `num_rows` tokens is padded to: steps of 1, 16, 32, 128 and 256."""
    for limit, step in ((8, 1), (128, 16), (256, 32), (1024, 128)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 256) * 256


def warm_sizes(max_rows: int) -> list[int]:
    """Every value of `round_rows` up to `max_rows`."""
    return sorted({round_rows(n) for n in range(1, max_rows + 1)})


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a prepacked path for this type on this CPU; bfloat16 needs AVX512 or AMX."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Linear:
    """y = act(x W^T + b), with an optional product or sum fused behind it.

    weight: [out_features, in_features] float32 or bfloat16; x: [num_tokens, in_features] -> [num_tokens, out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        pack = torch.ops.mkldnn._reorder_linear_weight
        self.weight = pack(weight.contiguous(), 64) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        return self._run(x, "none")

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)."""
        if not self.packed:
            return functional.silu(functional.linear(x, self.weight, self.bias))
        return self._run(x, "swish")

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) * y, with y: [num_tokens, out_features]."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias).mul_(y)
        return self._run_binary(x, y, "mul")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) + y, with y: [num_tokens, out_features]."""
        if not self.packed:
            return functional.linear(x, self.weight, self.bias).add_(y)
        return self._run_binary(x, y, "add")

    def _run(self, x: Tensor, activation: str) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        chunks = [linear(c, self.weight, self.bias, activation, [], "") for c in x.split(MAX_PACKED_ROWS)]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _run_binary(self, x: Tensor, y: Tensor, operation: str) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise.binary
        pairs = zip(x.split(MAX_PACKED_ROWS), y.split(MAX_PACKED_ROWS), strict=True)
        chunks = [linear(a, b, self.weight, self.bias, operation) for a, b in pairs]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
