"""Linear layers by the C++ kernels (kernels/cpu/src/gemm.cpp): weights in panels, any number of rows at full speed.

Used where oneDNN is slower: AVX2, and bfloat16 weights on a CPU that can't multiply bfloat16. Activations are float32.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.cpu.library import CpuKernels
from gristmill.kernels.linear import Finish, LinearPart

FINISHES = {"plain": 0, "silu": 1, "mul": 2, "add": 3, "gated": 4}  # Finish of gemm.cpp


def has_panels(kernels: CpuKernels, dtype: torch.dtype) -> bool:
    """Whether linear layers with weights of this type run on the C++ kernels."""
    if dtype == torch.float32:
        return kernels.level == "avx2"
    return dtype == torch.bfloat16 and kernels.level in ("avx2", "avx512")


def activation_dtype(kernels: CpuKernels, dtype: torch.dtype) -> torch.dtype:
    """What activations are kept in when weights are of `dtype`: float32 where the CPU has no bfloat16 products."""
    return torch.float32 if has_panels(kernels, dtype) else dtype


def pack_panels(weight: Tensor, width: int) -> Tensor:
    """[out_features, in_features] -> [panels, in_features, width], in bfloat16 [panels, in_features / 2, width, 2].

    Zeros fill up the last panel, and an odd number of bfloat16 inputs.
    """
    out_features, in_features = weight.shape
    pack = 4 // weight.element_size()
    padded = functional.pad(weight, (0, -in_features % pack, 0, -out_features % width))
    split = padded.view(-1, width, padded.shape[1] // pack, pack)
    return split.permute(0, 2, 1, 3).contiguous()


class PanelLinear(LinearPart):
    """y = f(x W^T + b); with up_weight instead silu(x W^T + b) * (x U^T + c).

    weight, up_weight: [out_features, in_features] float32 or bfloat16; bias, up_bias: [out_features].
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        up_weight: Tensor | None = None,
        up_bias: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.num_weights = weight.numel() * (1 if up_weight is None else 2)
        lanes = library.gm_lanes()
        if up_weight is None:
            self.panels = pack_panels(weight, 2 * lanes)
        else:
            # Half a panel of each: a tile of results then holds both factors of its products.
            self.panels = torch.cat([pack_panels(w, lanes) for w in (weight, up_weight)], 2)
        self.num_bytes, self.is_gated = self.panels.nbytes, up_weight is not None
        self.bias, self.up_bias = to_float(bias), to_float(up_bias)
        self._gemm = _bind_gemm(library)

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        """See LinearPart. Computes in float32."""
        assert x.shape[1] == self.in_features, f"x has {x.shape[1]} columns, the weights {self.in_features}"
        rows, out = to_rows(x), torch.empty(len(x), self.out_features)
        if other is not None:
            assert other.shape == out.shape, f"{tuple(other.shape)} is not the shape of {tuple(out.shape)}"
            other = to_rows(other)
        self._gemm(
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.in_features,
            self.out_features,
            self.panels.data_ptr(),
            self.panels.dtype == torch.bfloat16,
            address(self.bias),
            address(self.up_bias if self.is_gated else other),
            0 if other is None else other.stride(0),
            out.data_ptr(),
            out.stride(0),
            FINISHES["gated" if self.is_gated else finish],
        )
        return out.to(x.dtype)


def to_rows(x: Tensor) -> Tensor:
    """x: [n, size] in float32, the numbers of a row side by side."""
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def to_float(x: Tensor | None) -> Tensor | None:
    """x, where there is one, in float32 and contiguous."""
    return None if x is None else x.float().contiguous()


def address(x: Tensor | None) -> int | None:
    """Where x lies; None is the null pointer."""
    return None if x is None else x.data_ptr()


def _bind_gemm(library: ctypes.CDLL) -> Any:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    gemm = library.gm_gemm
    gemm.restype = None
    gemm.argtypes = [
        *(pointer, size, size, size, size),  # x, its stride, M, K, N
        *(pointer, size, pointer),  # panels, whether they are bfloat16, bias
        *(pointer, size, pointer, size, size),  # other, its stride, out, its stride, finish
    ]
    return gemm
