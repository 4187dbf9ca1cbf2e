"""From a scheduled step to hidden states: builds the tensors of the step and runs the model on them.

It owns the device side: weights and KV cache. It decides nothing about which tokens run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.batch.groups import plan_groups
from gristmill.engine.batch.scheduler import ScheduledStep
from gristmill.engine.batch.sequence import Slots
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.model.decoder import Model
from gristmill.kernels.ops import AttentionBatch, KVCache, PrefixGroup


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of one step. `sampled`: the slots that get logits, in the order of logits_indices."""

    input_ids: Tensor  # [padded_tokens] int64
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    plan: Any  # what the kernels made of `attention`
    copies: NDArray[np.int32]  # [n, 2]
    logits_indices: Tensor  # [num_sampled] int64
    sampled: NDArray[np.int64]  # [num_sampled]


class ModelRunner:
    """Runs steps on one device."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._grouped: tuple[int, NDArray[np.int64], tuple[PrefixGroup, ...]] | None = None

    def build_input(self, step: ScheduledStep, slots: Slots) -> ModelInput:
        """Lays the step out, sequence after sequence."""
        counts, computed = step.num_new, slots.num_computed[step.slots]
        starts = np.concatenate([[0], np.cumsum(counts)])
        num_tokens = int(starts[-1])
        row_of = np.repeat(step.slots, counts)
        positions = np.arange(num_tokens) + np.repeat(computed - starts[:-1], counts)
        blocks = slots.tables[row_of, positions // BLOCK_SIZE].astype(np.int64)
        ids = slots.tokens[row_of, positions].astype(np.int64)
        done = np.flatnonzero(computed + counts == slots.num_tokens[step.slots])
        padding = self.model.padded_rows(num_tokens) - num_tokens
        if padding:
            ids, positions_padded = np.pad(ids, (0, padding)), np.pad(positions, (0, padding))
        else:
            positions_padded = positions
        attention = self._attention(step, slots, starts, computed)
        return ModelInput(
            torch.from_numpy(ids),
            torch.from_numpy(positions_padded),
            torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            attention,
            self.cache.plan(attention),
            step.copies,
            torch.from_numpy(starts[1:][done] - 1),
            step.slots[done],
        )

    @torch.inference_mode()
    def run(self, model_input: ModelInput) -> Tensor:
        """Hidden states [num_sampled, hidden_size] of the tokens to sample from; writes the KV cache."""
        if len(model_input.copies):
            self.cache.copy_blocks(model_input.copies)
        return self.model.forward(
            model_input.input_ids,
            model_input.positions,
            model_input.slot_mapping,
            self.cache,
            model_input.plan,
            model_input.logits_indices,
        )

    def _attention(
        self, step: ScheduledStep, slots: Slots, starts: NDArray[np.int64], computed: NDArray[np.int64]
    ) -> AttentionBatch:
        seq_lens = computed + step.num_new
        max_blocks = int(-(-seq_lens.max() // BLOCK_SIZE))
        tables = slots.tables[step.slots, :max_blocks]
        return AttentionBatch(
            starts,
            seq_lens,
            tables,
            self._groups(step, slots, tables, computed),
            self.model.config.sliding_window,
        )

    def _groups(
        self, step: ScheduledStep, slots: Slots, tables: NDArray[np.int32], computed: NDArray[np.int64]
    ) -> tuple[PrefixGroup, ...]:
        """The step's groups: those of the last step, while the same rows run."""
        last = self._grouped
        if last is not None and last[0] == slots.version and np.array_equal(last[1], step.slots):
            return last[2]
        groups = plan_groups(tables, computed // BLOCK_SIZE)
        self._grouped = (slots.version, step.slots, groups)
        return groups
