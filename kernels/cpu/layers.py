"""All decoder layers of a step in one call of the C++ kernels (kernels/cpu/src/layers.cpp).

Between the kernels of one row Python takes longer than some of them do; at many rows it is a small part. Where a layer
has weights or types that this can't take, LayerStack calls the operations one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gristmill.kernels.contract import KVCache, LayerStack, LayerWeights, ModelInput
from gristmill.kernels.cpu.linear import PanelLinear, address
from gristmill.kernels.cpu.linear_codes import CodesLinear
from gristmill.kernels.cpu.paged import PagedKVCache, supports
from gristmill.kernels.linear import Linear

_P, _I = ctypes.c_void_p, ctypes.c_int64


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


class CompiledStack(LayerStack):
    """The layers of a model for which `runs_layers` holds; steps with padding run one operation after the other."""

    def __init__(self, library: ctypes.CDLL, plain: LayerStack) -> None:
        super().__init__(plain.backend, plain.layers, plain.rope, plain.eps, plain.padded)
        layers = plain.layers
        self._norms = [_float_norms(layer) for layer in layers]  # the arguments point there
        args = [_layer_args(layer, norms) for layer, norms in zip(layers, self._norms, strict=True)]
        self._args = (_LayerArgs * len(layers))(*args)
        self._run = library.gristmill_layers
        self._run.restype, self._run.argtypes = None, [ctypes.POINTER(_LayersArgs)]

    def run(self, x: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        """See LayerStack. x: float32, contiguous; changed in place, and the result is its first rows."""
        num_tokens, first, kept = len(x), self.layers[0], inputs.kept
        if num_tokens != len(inputs.slot_mapping):
            return super().run(x, inputs, cache)
        assert isinstance(cache, PagedKVCache) and num_tokens == inputs.plan.num_tokens
        assert x.dtype == torch.float32 and x.is_contiguous()
        sizes = (first.qkv.out_features, first.output.in_features, first.down.in_features, x.shape[1])
        qkv, attended, inner, normed = (torch.empty(num_tokens, size) for size in sizes)
        append = cache.fill_append(0, qkv, self.rope, inputs.positions, inputs.slot_mapping)
        append.eps = 0.0 if first.head_norms is None else first.head_norms.eps
        attend = cache.fill_attend(0, qkv, attended, inputs.plan, self.scale)
        args = _LayersArgs(
            layers=ctypes.addressof(self._args),
            append=ctypes.addressof(append),
            attend=ctypes.addressof(attend),
            x=x.data_ptr(),
            normed=normed.data_ptr(),
            qkv=qkv.data_ptr(),
            attended=attended.data_ptr(),
            inner=inner.data_ptr(),
            kept=address(kept),
            num_layers=len(self.layers),
            num_rows=num_tokens,
            num_kept=0 if kept is None else len(kept),
            hidden_size=x.shape[1],
            kv_layer_bytes=cache.layer_bytes,
            eps=self.eps,
        )
        self._run(ctypes.byref(args))
        return x if kept is None else x[: len(kept)]


def runs_layers(layers: Sequence[LayerWeights], head_dim: int) -> bool:
    """Whether the kernels can run all that these layers hold; activations are float32 then."""
    parts = [part for layer in layers for linear in layer.linears for part in linear.parts]
    is_float = all(layer.input_norm.dtype == torch.float32 for layer in layers)
    return is_float and supports(head_dim) and all(isinstance(p, PanelLinear | CodesLinear) for p in parts)


def _float_norms(layer: LayerWeights) -> list[Tensor]:
    """Norms of the layer's input and MLP, and of queries and keys where there are such."""
    heads = layer.head_norms
    norms = [layer.input_norm, layer.mlp_norm, *(() if heads is None else (heads.q, heads.k))]
    return [norm.float().contiguous() for norm in norms]


def _layer_args(layer: LayerWeights, norms: Sequence[Tensor]) -> _LayerArgs:
    addresses = [norm.data_ptr() for norm in norms] + [None] * (4 - len(norms))
    return _LayerArgs(*addresses, *(_linear_args(linear) for linear in layer.linears))


def _linear_args(linear: Linear) -> _LinearArgs:
    parts, first = [], 0
    for runner in linear.parts:
        assert isinstance(runner, PanelLinear | CodesLinear)
        part = _PanelArgs(first=first, N=runner.out_features)
        if isinstance(runner, CodesLinear):
            part.codes = runner.weights_address
        else:
            part.panels, part.is_bf16 = runner.panels.data_ptr(), runner.panels.dtype == torch.bfloat16
            part.bias, part.up_bias = map(address, (runner.bias, runner.up_bias))
        parts.append(part)
        first += runner.out_features
    array = (_PanelArgs * len(parts))(*parts)
    return _LinearArgs(array, len(parts), linear.in_features, linear.out_features)
