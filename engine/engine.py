"""The engine: requests in, completions out.

`step()` schedules, runs, samples and finishes; how each is done is in the module of that name.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable

import torch

from engine.checkpoint import load_checkpoint, resolve_dtype
from engine.config import BLOCK_SIZE, EngineOptions, ModelConfig
from engine.errors import ModelRefused
from engine.memory import available_bytes
from engine.model import MAX_HEAD_ROWS, Model
from engine.model_runner import ModelInput, ModelRunner
from engine.request import Completion, EngineCounters, EngineInfo, Request
from engine.sampler import sample
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stop import StopChecker
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.weights import iterate_weights
from kernels.linear import can_pack
from kernels.ops import KVCache

logger = logging.getLogger(__name__)

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 1024  # of a step: on CPUs more gains nothing
MIN_NUM_BATCHED_TOKENS = 64
MAX_STEP_S = 10.0  # a slow model takes smaller steps: the worker hears of the engine between them
MIN_KV_CACHE_BYTES = 576 << 20
MIN_KV_CACHE_TOKENS = 8192


class Engine:
    """One model on one device. Not thread-safe: one loop adds, cancels and steps."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, tokenizer: Tokenizer, info: EngineInfo
    ) -> None:
        self.info = info
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self._sequences: dict[int, Sequence] = {}
        self._refused: list[Completion] = []

    def add(self, requests: list[Request]) -> None:
        """Queues requests. One that can never fit is completed with an error in the next step."""
        now = time.monotonic()
        accepted = []
        for request in requests:
            assert request.request_id not in self._sequences, f"request {request.request_id} is already here"
            problem = self._problem(request)
            if problem:
                self._refused.append(_refusal(request, *problem))
                continue
            sequence = Sequence(request, self._max_total_tokens(request), now)
            if request.sampling.stop:
                sequence.stop_checker = StopChecker(request.sampling.stop, self.tokenizer.detokenizer())
            self._sequences[request.request_id] = sequence
            accepted.append(sequence)
        self.scheduler.add(accepted)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Forgets these requests and frees their blocks; unknown ids are finished ones, and ignored."""
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self.scheduler.finish(sequence)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._refused)

    def counters(self) -> EngineCounters:
        """Cumulative counts and the present state."""
        return self.scheduler.counters()

    def step(self) -> list[Completion]:
        """Runs one step and returns the requests that it finished."""
        refused, self._refused = self._refused, []
        scheduled = self.scheduler.schedule()
        if not scheduled.items:
            return refused
        model_input = self.runner.build_input(scheduled)
        hidden = self.runner.run(model_input)
        tokens = self._sample(hidden, model_input)
        self.scheduler.advance(scheduled)
        return refused + self._finish(model_input.sampled, tokens)

    @torch.inference_mode()
    def _sample(self, hidden: torch.Tensor, model_input: ModelInput) -> list[int]:
        tokens: list[int] = []
        for start in range(0, len(hidden), MAX_HEAD_ROWS):
            logits = self.runner.model.logits(hidden[start : start + MAX_HEAD_ROWS])
            tokens += sample(logits, model_input.sampled[start : start + MAX_HEAD_ROWS])
        return tokens

    def _finish(self, sequences: list[Sequence], tokens: list[int]) -> list[Completion]:
        """Appends each sequence's token; those that reached an end leave and become completions."""
        now = time.monotonic()
        completions = []
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            sequence.finish_reason = self._finish_reason(sequence, token)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
                del self._sequences[sequence.request.request_id]
                completions.append(self._complete(sequence, now))
        return completions

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        sampling = sequence.request.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        if not sampling.ignore_eos and token in self.tokenizer.eos_token_ids:
            return "stop"
        if sequence.stop_checker is not None:
            sequence.stop_text = sequence.stop_checker.push(token)
            if sequence.stop_text is not None:
                return "stop"
        return "length" if len(sequence.token_ids) >= sequence.max_total_tokens else None

    def _complete(self, sequence: Sequence, now: float) -> Completion:
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        text = sequence.stop_text
        if text is None:
            ended = sequence.finish_reason == "stop"
            text = self.tokenizer.decode(output[:-1] if ended else output)
        assert sequence.first_scheduled_s is not None and sequence.first_token_s is not None
        return Completion(
            request_id=sequence.request.request_id,
            token_ids=output,
            text=text,
            finish_reason=sequence.finish_reason or "",
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=len(output),
            queue_wait_s=sequence.first_scheduled_s - sequence.arrival_s,
            time_to_first_token_s=sequence.first_token_s - sequence.arrival_s,
            time_per_token_s=(now - sequence.first_token_s) / max(1, len(output) - 1),
        )

    def _max_total_tokens(self, request: Request) -> int:
        limit = self.info.max_request_tokens
        if request.sampling.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.sampling.max_tokens)
        return limit

    def _problem(self, request: Request) -> tuple[str, str] | None:
        """(code, message) of a request that can't be run; None for the others."""
        size = len(request.prompt_token_ids)
        if size == 0:
            return "empty_prompt", "the prompt has no tokens; the model needs at least one"
        if size >= self.info.context_size:
            return (
                "prompt_too_long",
                f"{size} prompt tokens, the context holds {self.info.context_size} with the output",
            )
        if size >= self.info.max_request_tokens:
            room = self.info.max_request_tokens
            return (
                "request_too_large",
                f"{size} prompt tokens never fit the KV cache of {room}; shorten the prompt",
            )
        if max(request.prompt_token_ids) >= self.runner.model.config.vocab_size:
            return (
                "wrong_type",
                f"a prompt token id is beyond the vocabulary of {self.runner.model.config.vocab_size}",
            )
        return None


def build_engine(model: str, options: EngineOptions) -> Engine:
    """Loads the model at a path and returns an engine that is ready to step. Raises ModelRefused."""
    started = time.monotonic()
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    checkpoint = load_checkpoint(model)
    dtype_name = resolve_dtype(options.dtype)
    dtype: torch.dtype = getattr(torch, dtype_name)
    config = checkpoint.config
    tokenizer = load_tokenizer(model)
    num_blocks = _num_kv_blocks(config, options, dtype)
    context_size = min(config.context_size, options.max_model_tokens or config.context_size)
    max_request_tokens = min(context_size, num_blocks * BLOCK_SIZE)
    if not can_pack(dtype):
        logger.warning("no prepacked %s linears on this CPU: steps are several times slower", dtype_name)
    weights = Model(config, iterate_weights(checkpoint, dtype), dtype, max_request_tokens)
    with torch.inference_mode():
        budget = options.max_num_batched_tokens or _token_budget(weights)
        weights.warm(budget)
    max_num_seqs = min(options.max_num_seqs or MAX_NUM_SEQS, budget)
    cache = KVCache(
        config.num_layers,
        num_blocks,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        torch.device("cpu"),
    )
    info = EngineInfo(
        model=model,
        dtype=dtype_name,
        context_size=context_size,
        max_request_tokens=max_request_tokens,
        num_kv_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        load_s=time.monotonic() - started,
        device="cpu",
    )
    runner = ModelRunner(weights, cache, max_num_seqs, max_request_tokens)
    scheduler = Scheduler(num_blocks, max_num_seqs, budget, options.enable_prefix_cache)
    return Engine(runner, scheduler, tokenizer, info)


def _token_budget(model: Model) -> int:
    """The largest power of two whose step is expected to take at most MAX_STEP_S."""
    seconds, budget = model.step_seconds(MIN_NUM_BATCHED_TOKENS), MIN_NUM_BATCHED_TOKENS
    while budget < MAX_NUM_BATCHED_TOKENS and 2 * seconds <= MAX_STEP_S:
        seconds, budget = 2 * seconds, 2 * budget
    return budget


def _num_kv_blocks(config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> int:
    """Blocks of the KV cache: as told, else 8192 tokens or 576 MiB, whichever is more, at most 2/5 of free memory."""
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks
    block_bytes = BLOCK_SIZE * config.kv_bytes_per_token_f32 * dtype.itemsize // 4
    wanted = options.kv_cache_bytes
    if wanted is None:
        roomy = MIN_KV_CACHE_TOKENS * block_bytes // BLOCK_SIZE
        wanted = min(max(MIN_KV_CACHE_BYTES, roomy), available_bytes() * 2 // 5)
    if wanted < 2 * block_bytes:
        raise ModelRefused(
            f"a KV cache of {wanted} bytes holds no two blocks of {block_bytes}; free memory or choose a smaller model"
        )
    return int(wanted // block_bytes)


def _refusal(request: Request, code: str, message: str) -> Completion:
    size = len(request.prompt_token_ids)
    return Completion(request.request_id, array("I"), "", "error", size, 0, 0, 0.0, 0.0, 0.0, code, message)
