"""RMS norm and argmax by the C++ kernels (kernels/cpu/src/pointwise.cpp), with the results of torch's own."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_TYPES = (torch.float32, torch.bfloat16)


class PointwiseKernels:
    """The row-wise operations of one loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._rms_norm = library.gm_rms_norm
        self._rms_norm.restype = None
        self._rms_norm.argtypes = [pointer, size, pointer, pointer, size, size, ctypes.c_float, size, size]
        self._argmax = library.gm_argmax
        self._argmax.restype = None
        self._argmax.argtypes = [pointer, size, pointer, size, size, size]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight. x: [num_rows, size]; weight: [size]; each float32 or bfloat16, out like x."""
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

    def argmax(self, x: Tensor) -> Tensor:
        """[num_rows] int64: the first place of each row's maximum, or of its first NaN. x: [num_rows, size]."""
        assert x.dtype in _TYPES, f"no argmax of {x.dtype}"
        assert x.shape[1] > 0, "the argmax of no numbers"
        x = _to_rows(x)
        out = torch.empty(len(x), dtype=torch.int64)
        self._argmax(x.data_ptr(), x.stride(0), out.data_ptr(), *x.shape, x.dtype == torch.bfloat16)
        return out


def _to_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
