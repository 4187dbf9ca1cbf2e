"""Linear layers over quantized weights by the C++ kernels (src/gemm_codes.cpp), which read codes as they are.

No copy of the weights in numbers is kept. With float16 scales the results are, bit for bit, those of float32 panels
(linear.py) of the dequantized weights.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gristmill.kernels.cpu.linear import FINISHES, address, to_float, to_rows
from gristmill.kernels.linear import Finish, LinearPart
from gristmill.kernels.quantized import QuantizedTensor, concatenate

KINDS = ("int4", "int8", "fp8")  # in the order of gemm_codes.cpp
INT4_STEP = 8  # codes in a 32-bit lane


class _Weights(ctypes.Structure):
    """Weights of gemm_codes.cpp."""

    _fields_ = [
        ("panels", c_void_p),
        *((name, c_int64) for name in ("kind", "K", "N", "group_size")),
        *((name, c_int64) for name in ("scales_are_half", "has_offsets", "is_gated")),
        *((name, c_void_p) for name in ("columns", "bias", "up_bias")),
    ]


def why_no_codes(weight: QuantizedTensor) -> str | None:
    """Why the C++ kernels can't read these codes; None where they can."""
    fits = weight.kind != "int4" or weight.group_size % INT4_STEP == 0
    if fits or weight.group_size >= weight.shape[1]:
        return None
    return f"the kernels take int4 groups of a multiple of {INT4_STEP} columns, not {weight.group_size}"


def pack_codes(weight: QuantizedTensor, width: int) -> Tensor:
    """uint8 [panels, panel_bytes], a panel being `width` rows of W: each group's codes, scales and offsets in turn.

    int4 codes are [group_size / 8, width] lanes of 32 bits, others [group_size, width] bytes. Zeros fill up the last
    panel, and the last group of int4 to a multiple of 8.
    """
    step = INT4_STEP if weight.kind == "int4" else 1
    codes = weight.codes.view(torch.uint8)
    num_rows, num_columns = weight.shape
    if step > 1:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(torch.int32)
    codes = _to_panels(codes, width)  # [panels, num_columns / step, width]
    tables = [
        _to_panels(table.T.contiguous(), width)  # [panels, groups, width]
        for table in (weight.scales, weight.offsets)
        if table is not None
    ]
    # A group of the whole row may end within a lane: it counts as a last, shorter one.
    num_full = num_columns // weight.group_size if weight.group_size < num_columns else 0
    split = num_full * weight.group_size // step
    parts = []
    for part, groups in ((codes[:, :split], slice(0, num_full)), (codes[:, split:], slice(num_full, None))):
        num_groups = tables[0][:, groups].shape[1]
        if num_groups > 0:
            pieces = [part.contiguous(), *(table[:, groups].contiguous() for table in tables)]
            pieces = [piece.view(len(piece), num_groups, -1).view(torch.uint8) for piece in pieces]
            parts.append(torch.cat(pieces, 2).flatten(1))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _to_panels(rows: Tensor, width: int) -> Tensor:
    """[num_rows, n] -> [panels, n, width], zeros in the rows that are missing."""
    padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % width))
    return padded.view(-1, width, rows.shape[1]).transpose(1, 2)


def interleave(gate: QuantizedTensor, up: QuantizedTensor, lanes: int) -> QuantizedTensor:
    """`lanes` rows of one, the same rows of the other, and so on: a tile of results holds both factors of its products.

    Rows beyond the last are that row once more.
    """
    both = concatenate([gate, up])
    assert both is not None, "gate and up are not quantized alike"
    num_rows = gate.shape[0]
    rows = torch.arange(-(-num_rows // lanes) * lanes).clamp(max=num_rows - 1).view(-1, 1, lanes)
    return both.take_rows(torch.cat([rows, rows + num_rows], 1).flatten())


class CodesLinear(LinearPart):
    """y = f(x W^T + b); with `up` instead silu(x W^T + b) * (x U^T + c).

    weight, up: [out_features, in_features] of a kind and groups for which why_no_codes has nothing to say; bias,
    up_bias: [out_features]. Only the panels made of them are kept.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: QuantizedTensor,
        bias: Tensor | None = None,
        up: QuantizedTensor | None = None,
        up_bias: Tensor | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        assert why_no_codes(weight) is None, why_no_codes(weight)
        lanes = library.gm_lanes()
        packed = weight if up is None else interleave(weight, up, lanes)
        self.panels = pack_codes(packed, 2 * lanes)
        self.columns = None if packed.columns is None else packed.columns.contiguous()
        self.num_bytes = self.panels.nbytes + (0 if self.columns is None else self.columns.nbytes)
        self.bias, self.up_bias = to_float(bias), to_float(up_bias)
        self.is_gated, self.has_rows = up is not None, up is None
        self.num_weights = self.out_features * self.in_features * (1 if up is None else 2)
        self._weights = _Weights(
            self.panels.data_ptr(),
            KINDS.index(packed.kind),
            self.in_features,
            self.out_features,
            packed.group_size,
            packed.scales.dtype == torch.float16,
            packed.offsets is not None,
            self.is_gated,
            *map(address, (self.columns, self.bias, self.up_bias)),
        )
        self._reference = ctypes.byref(self._weights)
        self._gemm, self._take = _bind(library)

    @property
    def weights_address(self) -> int:
        """Of the Weights that gm_gemm_codes takes; it holds as long as this object does."""
        return ctypes.addressof(self._weights)

    def run(self, x: Tensor, finish: Finish = "plain", other: Tensor | None = None) -> Tensor:
        """See LinearPart. Computes in float32; a row's result does not depend on the rows around it."""
        num_rows, num_columns = x.shape
        assert num_columns == self.in_features, f"x has {num_columns} columns, the weights {self.in_features}"
        rows, out = to_rows(x), torch.empty(num_rows, self.out_features)
        if other is not None:
            assert other.shape == out.shape, f"{tuple(other.shape)} is not the shape of {tuple(out.shape)}"
            other = to_rows(other)
        self._gemm(
            self._reference,
            rows.data_ptr(),
            rows.stride(0),
            num_rows,
            address(other),
            0 if other is None else other.stride(0),
            out.data_ptr(),
            self.out_features,
            FINISHES["gated" if self.is_gated else finish],
        )
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def take_rows(self, ids: Tensor) -> Tensor:
        """See LinearPart. ids: from 0 to out_features - 1."""
        assert not self.is_gated, "gated weights hold the rows of two matrices"
        ids = ids.contiguous()
        array = ids.numpy()
        assert not len(array) or (array.min() >= 0 and array.max() < self.out_features), (
            "an id beyond the rows"
        )
        out = torch.empty(len(ids), self.in_features)
        self._take(self._reference, ids.data_ptr(), len(ids), out.data_ptr())
        return out


def _bind(library: ctypes.CDLL) -> tuple[Any, Any]:
    gemm, take = library.gm_gemm_codes, library.gm_take_codes
    gemm.restype = take.restype = None
    gemm.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64]
    take.argtypes = [c_void_p, c_void_p, c_int64, c_void_p]
    return gemm, take
