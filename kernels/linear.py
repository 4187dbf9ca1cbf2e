"""Linear layers packed once for the device and CPU: by the C++ kernels, by oneDNN, or as torch's plain F.linear.

oneDNN keeps weights in blocked layouts and generates code for every new number of rows (10 to 50 ms each), so on that
path row counts are rounded to a short list that `warm_sizes` runs before the first step. The C++ kernels take any.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu_library import NO_CPU_KERNELS, CpuKernels
from kernels.linear_cpu import PanelLinear, has_panels

MAX_PACKED_ROWS = 1024  # more rows than this are split: a larger oneDNN shape gains nothing


def round_rows(num_rows: int, any_rows: bool = False) -> int:
    """The number of rows a step of `num_rows` tokens is padded to: steps of 1, 16, 32, 128 and 256.

    any_rows: of Linear; nothing is padded where any number is as good.
    """
    if any_rows:
        return num_rows
    for limit, step in ((8, 1), (128, 16), (256, 32), (1024, 128)):
        if num_rows <= limit:
            return -(-num_rows // step) * step
    return -(-num_rows // 256) * 256


def warm_sizes(max_rows: int, any_rows: bool = False) -> list[int]:
    """Every value of `round_rows` up to `max_rows`; none where any number of rows is as good."""
    return [] if any_rows else sorted({round_rows(n) for n in range(1, max_rows + 1)})


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
    any_rows: whether each number of rows runs at full speed without having been warmed.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, kernels: CpuKernels = NO_CPU_KERNELS
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._runner = _build_runner(weight, bias, kernels)
        self.any_rows = not isinstance(self._runner, _OneDnnLinear)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return self._runner.run(x, "plain")

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)."""
        return self._runner.run(x, "silu")

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) * y, with y: [num_tokens, out_features]."""
        return self._runner.run(x, "mul", y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) + y, with y: [num_tokens, out_features]."""
        return self._runner.run(x, "add", y)


class GatedLinear:
    """silu(x G^T + b) * (x U^T + c), in one pass over the weights where the C++ kernels run.

    gate_weight, up_weight: [out_features, in_features]; x: [num_tokens, in_features] -> [num_tokens, out_features].
    """

    def __init__(
        self,
        gate_weight: Tensor,
        up_weight: Tensor,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        kernels: CpuKernels = NO_CPU_KERNELS,
    ) -> None:
        self.out_features, self.in_features = gate_weight.shape
        self._panels: PanelLinear | None = None
        if kernels.library is not None and _runs_on_panels(gate_weight, kernels):
            self._panels = PanelLinear(kernels.library, gate_weight, gate_bias, up_weight, up_bias)
            self.any_rows = True
        else:
            self._gate, self._up = Linear(gate_weight, gate_bias), Linear(up_weight, up_bias)
            self.any_rows = self._gate.any_rows

    def __call__(self, x: Tensor) -> Tensor:
        """silu(x G^T + b) * (x U^T + c)."""
        if self._panels is not None:
            return self._panels.run(x, "gated")
        return self._up.mul(x, self._gate.silu(x))


class _TorchLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if other is None:
            return functional.silu(y) if finish == "silu" else y
        return y.mul_(other) if finish == "mul" else y.add_(other)


class _OneDnnLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)
        self.bias = bias

    def run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        chunks = x.split(MAX_PACKED_ROWS)
        if other is None:
            activation = "swish" if finish == "silu" else "none"
            done = [linear(c, self.weight, self.bias, activation, [], "") for c in chunks]
        else:
            pairs = zip(chunks, other.split(MAX_PACKED_ROWS), strict=True)
            done = [linear.binary(a, b, self.weight, self.bias, finish) for a, b in pairs]
        return done[0] if len(done) == 1 else torch.cat(done)


def _build_runner(
    weight: Tensor, bias: Tensor | None, kernels: CpuKernels
) -> PanelLinear | _OneDnnLinear | _TorchLinear:
    if kernels.library is not None and _runs_on_panels(weight, kernels):
        return PanelLinear(kernels.library, weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return _OneDnnLinear(weight, bias)
    return _TorchLinear(weight, bias)


def _runs_on_panels(weight: Tensor, kernels: CpuKernels) -> bool:
    return weight.device.type == "cpu" and has_panels(kernels, weight.dtype)
