"""What every step of the engine did and how long its parts took: the record behind `gristmill bench`.

Kept only when EngineOptions.record_steps asks for it; a million steps are some 200 MB.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times in seconds; `start_s` on the monotonic clock."""

    start_s: float
    schedule_s: float  # the batcher's decision
    build_s: float  # laying the step out: input tensors and the attention plan
    forward_s: float  # the layers
    sample_s: float  # the head and the choice of tokens
    finish_s: float  # ends of rows, their texts not included
    num_decode_tokens: int  # rows that had one token to compute
    num_prefill_tokens: int  # all others: prompts, and outputs recomputed after a preemption
    num_sampled: int
    num_finished: int
    num_preempted: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    context_tokens: int  # keys in the cache of the step's sequences, shared ones counted for each
    unique_context_tokens: int  # the same, what a group shares counted once
    num_query_keys: int  # pairs of a query and a key that it sees, over the step's tokens

    @property
    def bookkeeping_s(self) -> float:
        """The time of the step in which no tensor was computed."""
        return self.schedule_s + self.build_s + self.finish_s

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.bookkeeping_s + self.forward_s + self.sample_s
