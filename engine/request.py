"""What crosses the engine's border: requests in, completions out, and the numbers about both.

Nothing here imports torch: the parent process builds requests and reads completions without it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

# Kinds of sampling. PLAIN: from the whole distribution; SORTED: from all of it, in order of probability.
GREEDY, PLAIN, TOP_K, SORTED = range(4)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. temperature 0 is greedy; top_k 0 is off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None  # None: to the end of text or of the context
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def kind(self) -> int:
        """Which of the sampler's paths a row takes, by its own parameters, never its neighbours'."""
        if self.temperature == 0.0:
            return GREEDY
        if self.top_k > 0:
            return TOP_K
        return PLAIN if self.top_p >= 1.0 and self.min_p <= 0.0 else SORTED

    @property
    def has_penalties(self) -> bool:
        """Whether the row's earlier tokens change its logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete. `request_id` is unique in its process; `seed` is the sample's, not the job's."""

    request_id: int
    prompt_token_ids: array[int]  # typecode "I"
    sampling: SamplingParams
    seed: int = 0
    group: int = 0  # requests of one job: their output lengths are learned together


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request. finish_reason: stop (end of text, stop string or token), length, or error."""

    request_id: int
    token_ids: array[int]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    queue_wait_s: float  # arrival in the engine -> first scheduled
    time_to_first_token_s: float  # arrival -> first token
    time_per_token_s: float  # mean over the tokens after the first; 0 when there is only one
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine says of itself."""

    model: str
    dtype: str
    context_size: int  # tokens, prompt + output
    max_request_tokens: int  # the most tokens one request can ever hold in the KV cache
    num_kv_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    load_s: float
    device: str
    cpu_kernels: str = "none"  # the instruction set of our own kernels that is in use; none: torch's only
    linear_bits: float = (
        32.0  # of a weight of the layers' linears as it lies in memory, scales and offsets included
    )
    head_bits: float = 32.0  # the same, of the head
    kv_bits: int = 32  # of a key or value in the cache


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Cumulative counts of one engine, and its present state (the last four)."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of the requests that were admitted
    num_cached_tokens: int = 0
    num_computed_prompt_tokens: int = 0  # over all steps: those computed again after a preemption too
    num_output_tokens: int = 0
    num_preemptions: int = 0
    scheduled_tokens_while_waiting: int = 0  # over steps during which rows waited
    budget_tokens_while_waiting: int = 0
    kv_waste_sum: float = 0.0  # share of allocated KV slots that hold no token, summed over steps
    kv_waste_samples: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_kv_blocks_used: int = 0
    num_kv_blocks: int = 0

    def minus(self, earlier: EngineCounters) -> EngineCounters:
        """The counts since `earlier`; the state fields stay as they are."""
        state = {"num_running", "num_waiting", "num_kv_blocks_used", "num_kv_blocks"}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return EngineCounters(**{k: v if k in state else v - getattr(earlier, k) for k, v in values.items()})
