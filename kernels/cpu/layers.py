"""All decoder layers of a step in one call of the C++ kernels (kernels/cpu/src/layers.cpp).

Between the kernels of one row Python takes longer than some of them do; at many rows it is a small part. Where a layer
has weights or types that this can't take, engine/model/decoder.py calls the kernels one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gristmill.kernels.cpu.library import CpuKernels
from gristmill.kernels.cpu.linear import PanelLinear
from gristmill.kernels.cpu.linear_codes import CodesLinear
from gristmill.kernels.cpu.paged import PagedPlan, PagedStorage, fill_append, fill_attend, supports

if TYPE_CHECKING:
    from gristmill.kernels.linear import GatedLinear, Linear
    from gristmill.kernels.ops import HeadNorms, RopeTables

_P, _I = ctypes.c_void_p, ctypes.c_int64


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; head_norms where the architecture has them."""

    input_norm: Tensor
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    gated: GatedLinear  # silu(gate x) * up x: [intermediate_size]
    down: Linear


class _PanelArgs(ctypes.Structure):
    """PanelArgs of kernels/cpu/src/layers.h."""

    _fields_ = [
        *((name, _P) for name in ("codes", "panels", "bias", "up_bias")),
        *((name, _I) for name in ("first", "N", "is_bf16")),
    ]


class _LinearArgs(ctypes.Structure):
    """LinearArgs of kernels/cpu/src/layers.h."""

    _fields_ = [("parts", ctypes.POINTER(_PanelArgs)), *((name, _I) for name in ("num_parts", "K", "N"))]


class _LayerArgs(ctypes.Structure):
    """LayerArgs of kernels/cpu/src/layers.h."""

    _fields_ = [
        *((name, _P) for name in ("input_norm", "mlp_norm", "q_norm", "k_norm")),
        *((name, _LinearArgs) for name in ("qkv", "output", "gated", "down")),
    ]


class _LayersArgs(ctypes.Structure):
    """LayersArgs of kernels/cpu/src/layers.h."""

    _fields_ = [
        *((name, _P) for name in ("layers", "append", "attend")),
        *((name, _P) for name in ("x", "normed", "qkv", "attended", "inner", "kept")),
        *((name, _I) for name in ("num_layers", "num_rows", "num_kept", "hidden_size", "kv_layer_bytes")),
        ("eps", ctypes.c_float),
    ]


class LayersCpu:
    """The layers of a model, ready to run; made by build_layers."""

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[LayerWeights], eps: float, num_heads: int
    ) -> None:
        self._eps, self._num_heads = eps, num_heads
        self._layers, self._norms = (
            layers,
            [_float_norms(layer) for layer in layers],
        )  # the arguments point there
        args = [_layer_args(layer, norms) for layer, norms in zip(layers, self._norms, strict=True)]
        self._args = (_LayerArgs * len(layers))(*args)
        self._run = library.gristmill_layers
        self._run.restype, self._run.argtypes = None, [ctypes.POINTER(_LayersArgs)]

    def run(
        self,
        x: Tensor,
        storage: PagedStorage,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        plan: PagedPlan,
        scale: float,
        kept: Tensor | None,
    ) -> Tensor:
        """Adds every layer's contribution to x: [num_tokens, hidden_size] float32, contiguous, in place.

        Writes the keys and values of its tokens. positions, slot_mapping: see KVCache.append. kept: see Model.forward;
        returns the rows of x that hold the result.
        """
        num_tokens, first = len(x), self._layers[0]
        assert x.dtype == torch.float32 and x.is_contiguous() and num_tokens == plan.num_tokens
        sizes = (first.qkv.out_features, first.output.in_features, first.down.in_features, x.shape[1])
        qkv, attended, inner, normed = (torch.empty(num_tokens, size) for size in sizes)
        append = fill_append(storage, 0, qkv, rope, positions, slot_mapping, self._num_heads)
        append.eps = 0.0 if first.head_norms is None else first.head_norms.eps
        attend = fill_attend(storage, 0, qkv, attended, plan, scale, self._num_heads)
        args = _LayersArgs(
            layers=ctypes.addressof(self._args),
            append=ctypes.addressof(append),
            attend=ctypes.addressof(attend),
            x=x.data_ptr(),
            normed=normed.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            inner=inner.data_ptr(),
            kept=_address(kept),
            num_layers=len(self._layers),
            num_rows=num_tokens,
            num_kept=0 if kept is None else len(kept),
            hidden_size=x.shape[1],
            kv_layer_bytes=storage.layer_bytes,
            eps=self._eps,
        )
        self._run(ctypes.byref(args))
        return x if kept is None else x[: len(kept)]


def build_layers(
    kernels: CpuKernels,
    layers: Sequence[LayerWeights],
    eps: float,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> LayersCpu | None:
    """What runs these layers in one call; None where they hold something that the kernels don't run.

    dtype: of activations.
    """
    linears = [linear for layer in layers for linear in (layer.qkv, layer.output, layer.gated, layer.down)]
    runners = [runner for linear in linears for runner in linear.runners or (None,)]
    are_compiled = all(isinstance(runner, PanelLinear | CodesLinear) for runner in runners)
    if kernels.library is None or dtype != torch.float32 or not (are_compiled and supports(head_dim)):
        return None
    return LayersCpu(kernels.library, layers, eps, num_heads)


def _float_norms(layer: LayerWeights) -> list[Tensor]:
    """Norms of the layer's input and MLP, and of queries and keys where there are such."""
    heads = layer.head_norms
    norms = [layer.input_norm, layer.mlp_norm, *(() if heads is None else (heads.q, heads.k))]
    return [norm.float().contiguous() for norm in norms]


def _layer_args(layer: LayerWeights, norms: Sequence[Tensor]) -> _LayerArgs:
    addresses = [norm.data_ptr() for norm in norms] + [None] * (4 - len(norms))
    linears = (layer.qkv, layer.output, layer.gated, layer.down)
    return _LayerArgs(*addresses, *(_linear_args(linear) for linear in linears))


def _linear_args(linear: Linear | GatedLinear) -> _LinearArgs:
    parts, first = [], 0
    for runner in linear.runners:
        assert isinstance(runner, PanelLinear | CodesLinear)
        part = _PanelArgs(first=first, N=runner.out_features)
        if isinstance(runner, CodesLinear):
            part.codes = runner.weights_address
        else:
            part.panels, part.is_bf16 = runner.panels.data_ptr(), runner.panels.dtype == torch.bfloat16
            part.bias, part.up_bias = map(_address, (runner.bias, runner.up_bias))
        parts.append(part)
        first += runner.out_features
    array = (_PanelArgs * len(parts))(*parts)
    return _LinearArgs(array, len(parts), linear.in_features, linear.out_features)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
