"""From a scheduled step to logits: builds the tensors of the step and runs the model on them.

It owns the device side: weights, KV cache, block-table array. It decides nothing about which tokens run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import BLOCK_SIZE
from engine.model import Model
from engine.prefix import PrefixNode
from engine.scheduler import ScheduledStep
from engine.sequence import Sequence
from kernels.linear import round_rows
from kernels.ops import AttentionBatch, KVCache, PrefixGroup

MIN_GROUP_SAVING = 16  # blocks that a shared prefix must save a step before it is worth calls of its own


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tensors of one step. `sampled`: the sequences that get logits, in the order of logits_indices."""

    input_ids: Tensor  # [padded_tokens] int64
    positions: Tensor  # [padded_tokens] int64
    slot_mapping: Tensor  # [num_tokens] int64
    attention: AttentionBatch
    logits_indices: Tensor  # [num_sampled] int64
    sampled: list[Sequence]


class ModelRunner:
    """Runs steps on one device."""

    def __init__(self, model: Model, cache: KVCache, max_num_seqs: int, max_request_tokens: int) -> None:
        self.model, self.cache = model, cache
        self._tables = np.zeros((max_num_seqs, -(-max_request_tokens // BLOCK_SIZE)), dtype=np.int32)
        self._lists: list[list[int] | None] = [None] * max_num_seqs
        self._num_synced = [0] * max_num_seqs

    def build_input(self, step: ScheduledStep) -> ModelInput:
        """Lays the step out: sequences of one prefix group side by side, then the others."""
        items, groups = _arrange(step.items)
        counts = np.fromiter((n for _, n in items), np.int64, len(items))
        computed = np.fromiter((s.num_computed_tokens for s, _ in items), np.int64, len(items))
        slots = np.fromiter((self._sync(s) for s, _ in items), np.int64, len(items))
        starts = np.concatenate([[0], np.cumsum(counts)])
        num_tokens = int(starts[-1])
        sequence_of = np.repeat(np.arange(len(items)), counts)
        positions = np.arange(num_tokens) - starts[sequence_of] + computed[sequence_of]
        blocks = self._tables[slots[sequence_of], positions // BLOCK_SIZE].astype(np.int64)
        ids = np.concatenate(
            [
                np.array(s.token_ids[s.num_computed_tokens : s.num_computed_tokens + n], np.int64)
                for s, n in items
            ]
        )
        done = [i for i, (s, n) in enumerate(items) if n == s.num_uncomputed_tokens]
        padding = round_rows(num_tokens) - num_tokens
        seq_lens = computed + counts
        max_blocks = int(-(-seq_lens.max() // BLOCK_SIZE))
        return ModelInput(
            torch.from_numpy(np.pad(ids, (0, padding))),
            torch.from_numpy(np.pad(positions, (0, padding))),
            torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            AttentionBatch(
                starts, seq_lens, self._tables[slots, :max_blocks], groups, self.model.config.sliding_window
            ),
            torch.from_numpy(starts[1:][done] - 1),
            [items[i][0] for i in done],
        )

    @torch.inference_mode()
    def run(self, model_input: ModelInput) -> Tensor:
        """Hidden states [num_sampled, hidden_size] of the tokens to sample from; writes the KV cache."""
        plan = self.cache.plan(model_input.attention)
        hidden = self.model.forward(
            model_input.input_ids, model_input.positions, model_input.slot_mapping, self.cache, plan
        )
        return hidden.index_select(0, model_input.logits_indices)

    def _sync(self, sequence: Sequence) -> int:
        """Brings the sequence's row of the block-table array up to date; returns its slot."""
        slot, table = sequence.slot, sequence.block_table
        if self._lists[slot] is not table:
            self._lists[slot], self._num_synced[slot] = table, 0
        synced = self._num_synced[slot]
        if synced != len(table):
            self._tables[slot, synced : len(table)] = table[synced:]
            self._num_synced[slot] = len(table)
        return slot


def _arrange(items: list[tuple[Sequence, int]]) -> tuple[list[tuple[Sequence, int]], tuple[PrefixGroup, ...]]:
    """The items with prefix groups first and contiguous, and those groups."""
    sharers: defaultdict[PrefixNode | None, list[tuple[Sequence, int]]] = defaultdict(list)
    for item in items:
        sharers[_shared_node(item[0])].append(item)
    ordered: list[tuple[Sequence, int]] = []
    alone = sharers.pop(None, [])
    groups = []
    for node, members in sharers.items():
        assert node is not None
        if (len(members) - 1) * node.end < MIN_GROUP_SAVING:
            alone += members
            continue
        groups.append(PrefixGroup(len(ordered), len(members), node.end))
        ordered += members
    return ordered + alone, tuple(groups)


def _shared_node(sequence: Sequence) -> PrefixNode | None:
    """The node of the sequence's path that saves most when all its running users share one pass over it."""
    best, most = None, 0
    limit = min(sequence.num_tree_blocks, sequence.num_computed_tokens // BLOCK_SIZE)
    node = sequence.prefix_leaf
    while node is not None and node.parent is not None:
        saving = (node.num_running - 1) * node.end
        if saving > most and node.end <= limit:
            best, most = node, saving
        node = node.parent
    return best
