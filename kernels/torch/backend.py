"""The CPU by torch's own kernels: linears by oneDNN or F.linear, attention as in attention.py.

oneDNN keeps weights in blocked layouts and generates code for every new number of rows (10 to 50 ms each), so on that
path row counts are rounded to a short list, which a model runs before its first step.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.contract import Backend, KVCache, KVSpec
from gristmill.kernels.linear import Finish, LinearPart
from gristmill.kernels.quantized import QuantizedTensor, Weight
from gristmill.kernels.torch.attention import TorchKVCache
from gristmill.kernels.torch.memory import available_bytes

logger = logging.getLogger(__name__)

MAX_PACKED_ROWS = 1024  # more rows than this are split: a larger oneDNN shape gains nothing
MAX_CODES_ROWS = 8  # up to so many rows at once, codes are faster than bfloat16: they are fewer bytes


class TorchBackend(Backend):
    """multiplies_bfloat16: whether the CPU does so natively, by the highest instructions that may be used."""

    device = torch.device("cpu")

    def __init__(self, multiplies_bfloat16: bool = False) -> None:
        self._multiplies_bfloat16 = multiplies_bfloat16

    def linear_part(self, weight: Weight, bias: Tensor | None) -> LinearPart:
        """See Backend. Codes are held as float32."""
        if isinstance(weight, QuantizedTensor):
            _say_dequantized(self.why_no_codes(weight) or "")
            part = self.linear_part(weight.dequantize(), None if bias is None else bias.float())
            return _Float32Linear(part) if isinstance(part, _TorchLinear) else part
        return _OneDnnLinear(weight, bias) if can_pack(weight.dtype) else _TorchLinear(weight, bias)

    def why_no_codes(self, weight: QuantizedTensor) -> str | None:
        """Why these codes are not multiplied as they are; None where they are."""
        return "there are no C++ kernels"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def argmax(self, logits: Tensor) -> Tensor:
        """See Backend."""
        return logits.argmax(-1)

    def kv_cache(self, spec: KVSpec, num_blocks: int) -> KVCache:
        """See Backend."""
        return TorchKVCache(self, spec, num_blocks)

    def available_bytes(self) -> int:
        """See Backend."""
        return available_bytes()

    def round_rows(self, num_rows: int) -> int:
        """Steps of 1, 16, 32, 128 and 256."""
        for limit, step in ((8, 1), (128, 16), (256, 32), (1024, 128)):
            if num_rows <= limit:
                return -(-num_rows // step) * step
        return -(-num_rows // 256) * 256

    def max_codes_rows(self, dtype: torch.dtype) -> int | None:
        """See Backend. Codes are multiplied in float32: far more slowly than bfloat16, where the CPU has it."""
        return MAX_CODES_ROWS if self._multiplies_bfloat16 and dtype == torch.bfloat16 else None

    def report_slow_paths(self, dtype: torch.dtype) -> None:
        """See Backend."""
        logger.warning("running on torch's own kernels: steps are slower than with the C++ kernels")
        if not can_pack(dtype):
            logger.warning("no prepacked %s linears on this CPU: steps are several times slower", dtype)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a prepacked path for this type on this CPU; bfloat16 needs AVX512 or AMX."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class _TorchLinear(LinearPart):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_weights, self.num_bytes = weight.numel(), weight.nbytes
        self.weight, self.bias = weight, bias

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        y = functional.linear(x, self.weight, self.bias)
        if other is None:
            return functional.silu(y) if finish == "silu" else y
        return y.mul_(other) if finish == "mul" else y.add_(other)


class _OneDnnLinear(_TorchLinear):
    any_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 64)

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        chunks = x.split(MAX_PACKED_ROWS)
        if other is None:
            activation = "swish" if finish == "silu" else "none"
            done = [linear(c, self.weight, self.bias, activation, [], "") for c in chunks]
        else:
            pairs = zip(chunks, other.split(MAX_PACKED_ROWS), strict=True)
            done = [linear.binary(a, b, self.weight, self.bias, finish) for a, b in pairs]
        return done[0] if len(done) == 1 else torch.cat(done)


class _Float32Linear(LinearPart):
    """Any type of x through a linear that takes float32 only."""

    def __init__(self, part: LinearPart) -> None:
        self._part, self.any_rows = part, part.any_rows
        self.out_features, self.in_features = part.out_features, part.in_features
        self.num_weights, self.num_bytes = part.num_weights, part.num_bytes

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        return self._part.run(x.float(), finish, None if other is None else other.float()).to(x.dtype)


@cache
def _say_dequantized(reason: str) -> None:
    logger.warning("quantized weights are held as float32, 4 bytes a weight: %s", reason)
