"""The CPU by the C++ kernels of this folder, and by torch's own where those are faster or can't do a shape."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.kernels.contract import Backend, KVCache, KVSpec, LayerStack, LayerWeights, RopeTables, RowsOf
from gristmill.kernels.cpu.features import cap_level, detect_level, has_level
from gristmill.kernels.cpu.layers import CompiledStack, runs_layers
from gristmill.kernels.cpu.library import CpuKernels, load_cpu_kernels
from gristmill.kernels.cpu.linear import PanelLinear, activation_dtype, has_panels
from gristmill.kernels.cpu.linear_codes import CodesLinear, why_no_codes
from gristmill.kernels.cpu.paged import PagedKVCache, supports
from gristmill.kernels.linear import Linear, LinearPart
from gristmill.kernels.quantized import QuantizedTensor, Weight, are_alike
from gristmill.kernels.torch.backend import TorchBackend

logger = logging.getLogger(__name__)

_TYPES = (torch.float32, torch.bfloat16)


def build_backend(cap: str = "auto") -> Backend:
    """The CPU's backend with kernels no higher than `cap`; they are built now if they aren't in the cache."""
    is_native = has_level(cap_level(detect_level(), cap), "avx512_bf16")
    kernels = load_cpu_kernels(cap)
    return TorchBackend(is_native) if kernels.library is None else CpuBackend(kernels, is_native)


class CpuBackend(TorchBackend):
    """kernels: those of one loaded library."""

    def __init__(self, kernels: CpuKernels, multiplies_bfloat16: bool = False) -> None:
        super().__init__(multiplies_bfloat16)
        assert kernels.library is not None
        self.instructions, self.kernels, self.library = kernels.level, kernels, kernels.library
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._rms_norm, self._argmax = self.library.gm_rms_norm, self.library.gm_argmax
        self._rms_norm.restype = self._argmax.restype = None
        self._rms_norm.argtypes = [pointer, size, pointer, pointer, size, size, ctypes.c_float, size, size]
        self._argmax.argtypes = [pointer, size, pointer, size, size, size]

    def linear_part(self, weight: Weight, bias: Tensor | None) -> LinearPart:
        """See Backend."""
        if isinstance(weight, QuantizedTensor) and why_no_codes(weight) is None:
            return CodesLinear(self.library, weight, bias)
        if isinstance(weight, Tensor) and has_panels(self.kernels, weight.dtype):
            return PanelLinear(self.library, weight, bias)
        return super().linear_part(weight, bias)

    def why_no_codes(self, weight: QuantizedTensor) -> str | None:
        """See TorchBackend."""
        return why_no_codes(weight)

    def gated_linear(
        self, gate: Weight, up: Weight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> Linear:
        """See Backend. One pass where both factors are of one kind."""
        if are_alike(gate, up):
            if isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
                if why_no_codes(gate) is None:
                    return Linear([CodesLinear(self.library, gate, gate_bias, up, up_bias)])
            elif isinstance(gate, Tensor) and isinstance(up, Tensor) and has_panels(self.kernels, gate.dtype):
                return Linear([PanelLinear(self.library, gate, gate_bias, up, up_bias)])
        return super().gated_linear(gate, up, gate_bias, up_bias)

    def layer_stack(
        self, layers: Sequence[LayerWeights], rope: RopeTables, eps: float, padded: RowsOf
    ) -> LayerStack:
        """See Backend. All layers in one call where the kernels can."""
        plain = super().layer_stack(layers, rope, eps, padded)
        is_compiled = runs_layers(layers, 2 * rope.cos.shape[1])
        return CompiledStack(self.library, plain) if is_compiled else plain

    def kv_cache(self, spec: KVSpec, num_blocks: int) -> KVCache:
        """See Backend."""
        if supports(spec.head_dim):
            return PagedKVCache(self, self.library, spec, num_blocks)
        return super().kv_cache(spec, num_blocks)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See Backend. float32 where the CPU has no bfloat16 products."""
        return activation_dtype(self.kernels, dtype)

    def report_slow_paths(self, dtype: torch.dtype) -> None:
        """See Backend."""
        if not has_level(self.instructions, "avx512"):
            logger.warning("no AVX512 in use: the AVX2 kernels run, in float32 arithmetic")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Backend. x, weight: float32 or bfloat16 each."""
        assert x.dtype in _TYPES and weight.dtype in _TYPES, f"no RMS norm of {x.dtype} by {weight.dtype}"
        assert weight.shape == x.shape[1:], f"{tuple(weight.shape)} weights for {tuple(x.shape)}"
        x, weight = _to_rows(x), weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            *x.shape,
            eps,
            x.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
        )
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        """See Backend. logits: float32 or bfloat16."""
        assert logits.dtype in _TYPES, f"no argmax of {logits.dtype}"
        assert logits.shape[1] > 0, "the argmax of no numbers"
        x = _to_rows(logits)
        out = torch.empty(len(x), dtype=torch.int64)
        self._argmax(x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape, x.dtype == torch.bfloat16)
        return out


def _to_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
