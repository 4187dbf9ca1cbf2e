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


class PanelLinear:
    """y = f(x W^T + b); with up_weight instead silu(x W^T + b) * (x U^T + c).

    weight, up_weight: [out_features, in_features] float32 or bfloat16; bias, up_bias: [out_features].
    """

    any_rows = True

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        up_weight: Tensor | None = None,
        up_bias: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        lanes = library.gm_lanes()
        if up_weight is None:
            self.panels = pack_panels(weight, 2 * lanes)
        else:
            # Half a panel of each: a tile of results then holds both factors of its products.
            self.panels = torch.cat([pack_panels(w, lanes) for w in (weight, up_weight)], 2)
        self.bias = None if bias is None else bias.float().contiguous()
        self.up_bias = None if up_bias is None else up_bias.float().contiguous()
        self._gemm = _bind_gemm(library)

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.nbytes

    def run(self, x: Tensor, finish: str, other: Tensor | None = None) -> Tensor:
        """f(x W^T + b) for f of FINISHES. x: [num_tokens, in_features]; other: [num_tokens, out_features].

        Computes in float32 and returns the type of x.
        """
        assert x.shape[1] == self.in_features, f"x has {x.shape[1]} columns, the weights {self.in_features}"
        rows = _to_rows(x)
        out = torch.empty(len(x), self.out_features, dtype=torch.float32)
        if other is not None:
            assert other.shape == out.shape, f"{tuple(other.shape)} is not the shape of {tuple(out.shape)}"
            other = _to_rows(other)
        self._gemm(
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            self.in_features,
            self.out_features,
            self.panels.data_ptr(),
            self.panels.dtype == torch.bfloat16,
            _address(self.bias),
            _address(self.up_bias if finish == "gated" else other),
            0 if other is None else other.stride(0),
            out.data_ptr(),
            out.stride(0),
            FINISHES[finish],
        )
        return out.to(x.dtype)


def _to_rows(x: Tensor) -> Tensor:
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _address(x: Tensor | None) -> int | None:
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
