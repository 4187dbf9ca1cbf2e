"""From a scheduled step to hidden states: builds the tensors of the step and runs the model on them.

It owns the device side: weights and KV cache. It decides nothing about which tokens run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.engine.batch.groups import plan_groups
from gristmill.engine.batch.scheduler import ScheduledStep
from gristmill.engine.batch.sequence import Slots
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.model.decoder import Model
from gristmill.kernels.contract import AttentionBatch, KVCache, ModelInput, PrefixGroup


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step ready to run. sampled: the slots that get logits, in the order of model_input.kept."""

    model_input: ModelInput
    attention: AttentionBatch
    copies: NDArray[np.int32]  # [n, 2]
    sampled: NDArray[np.int64]  # [num_sampled]


class ModelRunner:
    """Runs steps on one device."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self._grouped: tuple[int, NDArray[np.int64], tuple[PrefixGroup, ...]] | None = None

    def build_input(self, step: ScheduledStep, slots: Slots) -> StepInput:
        """Lays the step out, sequence after sequence."""
        counts, computed = step.num_new, slots.num_computed[step.slots]
        attention = self._attention(step, slots, computed)
        ids = slots.tokens[np.repeat(step.slots, counts), attention.positions()].astype(np.int64)
        done = np.flatnonzero(computed + counts == slots.num_tokens[step.slots])
        kept = attention.query_start_loc[1:][done] - 1
        model_input = self.model.build_input(ids, attention, self.cache, kept)
        return StepInput(model_input, attention, step.copies, step.slots[done])

    @torch.inference_mode()
    def run(self, step: StepInput) -> Tensor:
        """Hidden states [num_sampled, hidden_size] of the tokens to sample from; writes the KV cache."""
        if len(step.copies):
            self.cache.copy_blocks(step.copies)
        return self.model.forward(step.model_input, self.cache)

    def _attention(self, step: ScheduledStep, slots: Slots, computed: NDArray[np.int64]) -> AttentionBatch:
        seq_lens = computed + step.num_new
        max_blocks = int(-(-seq_lens.max() // BLOCK_SIZE))
        tables = slots.tables[step.slots, :max_blocks]
        return AttentionBatch(
            np.concatenate([[0], np.cumsum(step.num_new)]),
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
        groups = plan_groups(tables, computed // BLOCK_SIZE, self.model.backend.is_worthwhile)
        self._grouped = (slots.version, step.slots, groups)
        return groups
