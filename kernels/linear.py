"""Linear layers packed once for the device and CPU: by the C++ kernels, by oneDNN, or as torch's plain F.linear.

oneDNN keeps weights in blocked layouts and generates code for every new number of rows (10 to 50 ms each), so on that
path row counts are rounded to a short list that `warm_sizes` runs before the first step. The C++ kernels take any.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.cpu.library import NO_CPU_KERNELS, CpuKernels
from gristmill.kernels.cpu.linear import PanelLinear, has_panels
from gristmill.kernels.cpu.linear_codes import CodesLinear, why_no_codes
from gristmill.kernels.quantized import QuantizedTensor, concatenate

logger = logging.getLogger(__name__)

Weight = Tensor | QuantizedTensor
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

    weight: [out_features, in_features] float32, bfloat16 or quantized, or several whose rows follow each other;
    neighbours of one kind are joined. x: [num_tokens, in_features] -> [num_tokens, out_features].
    any_rows: whether each number of rows runs at full speed without having been warmed.
    runners: what runs, each for the outputs after those of the one before it.
    """

    def __init__(
        self,
        weight: Weight | Sequence[Weight],
        bias: Tensor | None = None,
        kernels: CpuKernels = NO_CPU_KERNELS,
    ) -> None:
        parts = _join_neighbours([weight] if isinstance(weight, Tensor | QuantizedTensor) else weight)
        self._sizes = [part.shape[0] for part in parts]
        self.out_features, self.in_features = sum(self._sizes), parts[0].shape[1]
        biases = [None] * len(parts) if bias is None else bias.split(self._sizes)
        pairs = zip(parts, biases, strict=True)
        self.runners = tuple(_build_runner(part, part_bias, kernels) for part, part_bias in pairs)
        self.any_rows = all(runner.any_rows for runner in self.runners)

    @property
    def num_weights(self) -> int:
        """How many weights there are, biases not counted."""
        return self.out_features * self.in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are held, with their scales and padding."""
        return sum(runner.num_bytes for runner in self.runners)

    @property
    def bits_per_weight(self) -> float:
        """num_bytes in bits, over the weights."""
        return 8 * self.num_bytes / self.num_weights

    @property
    def has_rows(self) -> bool:
        """Whether take_rows works: of quantized weights that are held as codes."""
        return len(self.runners) == 1 and isinstance(self.runners[0], CodesLinear)

    def take_rows(self, ids: Tensor) -> Tensor:
        """Rows of W, so that a head's weights are the embeddings too: [n, in_features] float32. ids: [n] int64."""
        runner = self.runners[0]
        assert self.has_rows and isinstance(runner, CodesLinear), "these weights are not held as codes"
        return runner.take_rows(ids)

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        return self._run(x, "plain")

    def silu(self, x: Tensor) -> Tensor:
        """silu(x W^T + b)."""
        return self._run(x, "silu")

    def mul(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) * y, with y: [num_tokens, out_features]."""
        return self._run(x, "mul", y)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) + y, with y: [num_tokens, out_features]."""
        return self._run(x, "add", y)

    def _run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        if len(self.runners) == 1:
            return self.runners[0].run(x, finish, other)
        others = [None] * len(self.runners) if other is None else other.split(self._sizes, 1)
        pairs = zip(self.runners, others, strict=True)
        return torch.cat([runner.run(x, finish, part) for runner, part in pairs], 1)


class GatedLinear:
    """silu(x G^T + b) * (x U^T + c), in one pass over the weights where the C++ kernels run.

    gate_weight, up_weight: [out_features, in_features]; x: [num_tokens, in_features] -> [num_tokens, out_features].
    runners: one where both factors come from one pass, else none.
    """

    def __init__(
        self,
        gate_weight: Weight,
        up_weight: Weight,
        gate_bias: Tensor | None = None,
        up_bias: Tensor | None = None,
        kernels: CpuKernels = NO_CPU_KERNELS,
    ) -> None:
        self.out_features, self.in_features = gate_weight.shape
        runner = _build_gated_runner(gate_weight, up_weight, gate_bias, up_bias, kernels)
        self.runners = () if runner is None else (runner,)
        self._linears: tuple[Linear, ...] = ()
        if runner is None:
            self._linears = (Linear(gate_weight, gate_bias, kernels), Linear(up_weight, up_bias, kernels))
        self.any_rows = all(linear.any_rows for linear in self._linears)

    @property
    def num_weights(self) -> int:
        """How many weights both have, biases not counted."""
        return 2 * self.out_features * self.in_features

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are held, with their scales and padding."""
        return sum(part.num_bytes for part in (*self.runners, *self._linears))

    @property
    def bits_per_weight(self) -> float:
        """num_bytes in bits, over the weights."""
        return 8 * self.num_bytes / self.num_weights

    def __call__(self, x: Tensor) -> Tensor:
        """silu(x G^T + b) * (x U^T + c)."""
        if self.runners:
            return self.runners[0].run(x, "gated")
        gate, up = self._linears
        return up.mul(x, gate.silu(x))


class _TorchLinear:
    any_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.num_bytes = weight, bias, weight.nbytes

    def run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if other is None:
            return functional.silu(y) if finish == "silu" else y
        return y.mul_(other) if finish == "mul" else y.add_(other)


class _OneDnnLinear:
    any_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_bytes = weight.nbytes
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


class _Float32Linear:
    """Any type of x through a linear that takes float32 only."""

    def __init__(self, runner: _OneDnnLinear | _TorchLinear) -> None:
        self._runner = runner
        self.any_rows, self.num_bytes = runner.any_rows, runner.num_bytes

    def run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        other = None if other is None else other.float()
        return self._runner.run(x.float(), finish, other).to(x.dtype)


_Runner = PanelLinear | CodesLinear | _OneDnnLinear | _TorchLinear | _Float32Linear


def _build_runner(weight: Weight, bias: Tensor | None, kernels: CpuKernels) -> _Runner:
    if isinstance(weight, QuantizedTensor):
        if kernels.library is not None and why_no_codes(weight) is None:
            return CodesLinear(kernels.library, weight, bias)
        _say_dequantized(why_no_codes(weight) or "there are no C++ kernels")
        runner = _build_runner(weight.dequantize(), None if bias is None else bias.float(), kernels)
        return _Float32Linear(runner) if isinstance(runner, _OneDnnLinear | _TorchLinear) else runner
    if kernels.library is not None and _runs_on_panels(weight, kernels):
        return PanelLinear(kernels.library, weight, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return _OneDnnLinear(weight, bias)
    return _TorchLinear(weight, bias)


def _build_gated_runner(
    gate: Weight, up: Weight, gate_bias: Tensor | None, up_bias: Tensor | None, kernels: CpuKernels
) -> PanelLinear | CodesLinear | None:
    """What computes both factors in one pass; None where nothing does."""
    if kernels.library is None or not _are_alike(gate, up):
        return None
    if isinstance(gate, Tensor) and isinstance(up, Tensor) and _runs_on_panels(gate, kernels):
        return PanelLinear(kernels.library, gate, gate_bias, up, up_bias)
    if isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor) and why_no_codes(gate) is None:
        return CodesLinear(kernels.library, gate, gate_bias, up, up_bias)
    return None


def _runs_on_panels(weight: Tensor, kernels: CpuKernels) -> bool:
    return weight.device.type == "cpu" and has_panels(kernels, weight.dtype)


@cache
def _say_dequantized(reason: str) -> None:
    logger.warning("quantized weights are held as float32, 4 bytes a weight: %s", reason)


def _join_neighbours(weights: Sequence[Weight]) -> list[Weight]:
    """The same rows in as few parts as their kinds allow."""
    groups: list[list[Weight]] = []
    for weight in weights:
        if groups and _are_alike(groups[-1][0], weight):
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _are_alike(a: Weight, b: Weight) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype
    no_rows = torch.empty(0, dtype=torch.int64)
    return concatenate([a.take_rows(no_rows), b.take_rows(no_rows)]) is not None


def _join(weights: Sequence[Weight]) -> Weight:
    """One weight of all rows of weights that are alike."""
    if isinstance(weights[0], Tensor):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)])
    joined = concatenate([weight for weight in weights if isinstance(weight, QuantizedTensor)])
    assert joined is not None
    return joined
