"""What an engine may ask of a device: the values that describe a step, and the Backend that computes it.

dispatch.py chooses a Backend once; nothing above it names a device. KV blocks are named by id only: how a block is laid
out inside belongs to the backend. `reference.py` is the oracle of each operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gristmill.kernels.linear import GatedPair, Linear, LinearPart
from gristmill.kernels.quantized import Weight, join_neighbours

RowsOf = Callable[[int], int]  # the number of rows that linears are called with for so many tokens


class RopeTables(NamedTuple):
    """cos and sin of every position's angles: [num_positions, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each head's queries and keys (Qwen3). q, k: [head_dim]."""

    q: Tensor
    k: Tensor
    eps: float


class KVScales(NamedTuple):
    """What an FP8 code is multiplied by. keys, values: [num_layers, num_kv_heads] float32, finite and above 0."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model keeps in its KV cache, in blocks of block_size tokens.

    dtype: float32, bfloat16 or float8_e4m3fn. FP8 is storage only: x is kept as the code nearest to x / scale, at most
    448 in size, and read as code * scale in float32; a NaN stays one. scales: given for FP8 and for nothing else.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scales: KVScales | None = None

    def __post_init__(self) -> None:
        assert (self.scales is not None) == (self.dtype == torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Neighbouring sequences of a step whose KV blocks first_block:first_block + num_blocks are the same blocks.

    Groups nest like a tree. The groups of one sequence follow each other from block 0 on, and all of its query rows
    come after them.
    """

    first_sequence: int
    num_sequences: int
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The geometry of one step's attention.

    Sequence i owns query rows query_start_loc[i]:query_start_loc[i + 1]; they are the last of its seq_lens[i] tokens.
    query_start_loc: [n + 1] int64; seq_lens: [n] int64; block_tables: [n, max_blocks] int32, padded with any id.
    """

    query_start_loc: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    block_tables: NDArray[np.int32]
    groups: tuple[PrefixGroup, ...] = ()
    sliding_window: int | None = None

    def positions(self) -> NDArray[np.int64]:
        """[num_tokens]: each query row's place in its sequence."""
        starts = self.query_start_loc
        return np.arange(starts[-1]) + np.repeat(self.seq_lens - starts[1:], np.diff(starts))


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step on the device, made by KVCache.build_input. Rows beyond those of slot_mapping are padding.

    input_ids, positions: [padded_tokens] int64; slot_mapping: [num_tokens] int64, block * block_size + offset; plan:
    what the cache worked out for all layers; kept: [num_kept] int64, ascending, the tokens whose hidden states are
    wanted; None: all of them.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    plan: Any
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one decoder layer; head_norms where the architecture has them."""

    input_norm: Tensor
    qkv: Linear  # [(num_heads + 2 num_kv_heads) * head_dim, hidden_size]
    head_norms: HeadNorms | None
    output: Linear
    mlp_norm: Tensor
    gated: Linear  # silu(gate x) * up x: [intermediate_size]
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All of them, in the order in which they run."""
        return self.qkv, self.output, self.gated, self.down


class KVCache(ABC):
    """Keys and values of all layers in blocks. Opaque: only the backend that made it reads it."""

    def __init__(self, backend: Backend, spec: KVSpec, num_blocks: int) -> None:
        self.backend, self.spec, self.num_blocks = backend, spec, num_blocks

    def like(self, num_blocks: int) -> KVCache:
        """An empty cache of the same model, type and scales with another number of blocks."""
        return self.backend.kv_cache(self.spec, num_blocks)

    def build_input(
        self,
        token_ids: NDArray[np.int64],
        batch: AttentionBatch,
        num_rows: int,
        kept: NDArray[np.int64] | None = None,
    ) -> ModelInput:
        """The step of these tokens, sequence after sequence, padded to num_rows; brought to the device at once."""
        positions, size = batch.positions(), self.spec.block_size
        rows = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start_loc))
        slots = batch.block_tables[rows, positions // size].astype(np.int64) * size + positions % size
        padding = (0, num_rows - len(token_ids))
        if padding[1]:
            token_ids, positions = np.pad(token_ids, padding), np.pad(positions, padding)
        arrays = (token_ids, positions, slots) if kept is None else (token_ids, positions, slots, kept)
        ids, places, slot_mapping, *more = self.backend.to_device(*arrays)
        return ModelInput(ids, places, slot_mapping, self.plan(batch), *more)

    @abstractmethod
    def append(
        self,
        layer: int,
        qkv: Tensor,
        rope: RopeTables,
        positions: Tensor,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """Normalizes (where the model does) and rotates queries and keys in place, then stores keys and values.

        qkv: [padded_tokens, (num_heads + 2 num_kv_heads) * head_dim]; positions, slot_mapping: see ModelInput.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """What a backend works out once a step and uses in every layer."""

    @abstractmethod
    def attend(self, layer: int, qkv: Tensor, plan: Any, scale: float) -> Tensor:
        """Causal attention of the queries in qkv (see append) over the cached keys.

        Returns [padded_tokens, num_heads * head_dim]; the rows of padding are zero.
        """

    @abstractmethod
    def largest(self) -> Tensor:
        """The largest size of a key and of a value in it: [2, num_layers, num_kv_heads] float32; of FP8, of a code."""

    @abstractmethod
    def copy_blocks(self, pairs: NDArray[np.int32]) -> None:
        """Copies whole blocks in all layers, pair after pair. pairs: [n, 2] int32, (from, to)."""


class LayerStack:
    """All decoder layers of a model, ready to run; this one calls the operations one by one."""

    def __init__(
        self, backend: Backend, layers: Sequence[LayerWeights], rope: RopeTables, eps: float, padded: RowsOf
    ) -> None:
        self.backend, self.layers, self.rope, self.eps, self.padded = backend, layers, rope, eps, padded
        self.scale = (2 * rope.cos.shape[1]) ** -0.5

    def run(self, x: Tensor, inputs: ModelInput, cache: KVCache) -> Tensor:
        """Hidden states after the last layer, of inputs.kept or of all tokens: [num_tokens, hidden_size].

        Writes keys and values of all tokens. x: [padded_tokens, hidden_size], may be changed. The last layer gives the
        tokens that are not kept nothing but keys and values.
        """
        kept, num_tokens, norm = inputs.kept, len(inputs.slot_mapping), self.backend.rms_norm
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(norm(x, layer.input_norm, self.eps))
            cache.append(index, qkv, self.rope, inputs.positions, inputs.slot_mapping, layer.head_norms)
            attended = cache.attend(index, qkv, inputs.plan, self.scale)
            if kept is not None and index == len(self.layers) - 1:
                num_tokens = len(kept)
                if not num_tokens:
                    return x[:0]
                kept = functional.pad(kept, (0, self.padded(num_tokens) - num_tokens))
                attended, x = attended[kept], x[kept]
            x = layer.output(attended, "add", x)
            x = layer.down(layer.gated(norm(x, layer.mlp_norm, self.eps)), "add", x)
        return x[:num_tokens]


class Backend(ABC):
    """One device's way of doing everything above, chosen once by dispatch.py. device: where weights and steps lie;
    instructions: what own kernels are compiled for; max_step_tokens: from here on a larger step gains nothing.
    """

    device: torch.device
    instructions = "none"
    max_step_tokens = 1024

    @abstractmethod
    def linear_part(self, weight: Weight, bias: Tensor | None) -> LinearPart:
        """X W^T + b, packed for the device. weight: [out_features, in_features]; bias: [out_features]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """X / sqrt(mean(x^2) + eps) * weight. x: [num_rows, size]; weight: [size]."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """The first place of each row's largest value, or of its first NaN. logits: [num_rows, size] -> int64."""

    @abstractmethod
    def kv_cache(self, spec: KVSpec, num_blocks: int) -> KVCache:
        """An empty cache. Raises ValueError for a size or type that the kernels can't do."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Bytes of the device's memory that are free for use."""

    def layer_stack(
        self, layers: Sequence[LayerWeights], rope: RopeTables, eps: float, padded: RowsOf
    ) -> LayerStack:
        """What runs all layers of a step."""
        return LayerStack(self, layers, rope, eps, padded)

    def linear(self, weight: Weight | Sequence[Weight], bias: Tensor | None = None) -> Linear:
        """Of one weight, or of several whose rows follow each other; neighbours of one kind are joined."""
        weights = join_neighbours(weight if isinstance(weight, Sequence) else [weight])
        sizes = [part.shape[0] for part in weights]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        return Linear([self.linear_part(*pair) for pair in zip(weights, biases, strict=True)])

    def gated_linear(
        self, gate: Weight, up: Weight, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
    ) -> Linear:
        """silu(x G^T + b) * (x U^T + c), in one pass where the backend can. gate, up: [out_features, in_features]."""
        return Linear([GatedPair(self.linear(gate, gate_bias), self.linear(up, up_bias))])

    def to_device(self, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
        """The arrays of a step as tensors on the device; they may share memory."""
        return tuple(torch.from_numpy(array).to(self.device) for array in arrays)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What activations are kept in when weights are of `dtype`."""
        return dtype

    def round_rows(self, num_rows: int) -> int:
        """The number of rows to which a call of linears without any_rows is padded."""
        return num_rows

    def max_codes_rows(self, dtype: torch.dtype) -> int | None:
        """Up to how many rows codes are faster than weights of `dtype`; None: for any number."""
        return None

    def is_worthwhile(self, num_sequences: int, num_blocks: int) -> bool:
        """Whether a prefix of so many blocks that so many sequences share is worth a pass of its own."""
        return (num_sequences - 1) * num_blocks >= 16

    @abstractmethod
    def report_slow_paths(self, dtype: torch.dtype) -> None:
        """Says once, in the log, what this machine or a cap keeps from being fast."""
