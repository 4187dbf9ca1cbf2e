"""The engine: requests in, completions out.

`step_finished()` schedules, runs, samples and finishes; how each is done is in the module of that name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from gristmill.engine.batch.scheduler import ScheduledStep, Scheduler
from gristmill.engine.batch.sequence import Sequence
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.model.runner import ModelRunner, StepInput
from gristmill.engine.model.sampler import sample, sampling_rows
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request
from gristmill.engine.step_trace import StepRecord
from gristmill.engine.text.stop import StopChecker
from gristmill.engine.text.tokenizer import Tokenizer


class Engine:
    """One model on one device. One loop adds, cancels and steps; only `complete` may be called by another thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        info: EngineInfo,
        record_steps: bool = False,
    ) -> None:
        self.info = info
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.step_records: list[StepRecord] = []
        self._record_steps = record_steps
        self._sequences: dict[int, Sequence] = {}
        self._refused: list[Sequence] = []

    def add(self, requests: list[Request]) -> None:
        """Queues requests. One that can never fit ends with an error in the next step."""
        now = time.monotonic()
        accepted = []
        for request in requests:
            assert request.request_id not in self._sequences, f"request {request.request_id} is already here"
            sequence = Sequence(request, self._max_total_tokens(request), now)
            sequence.error = self._problem(request)
            if sequence.error:
                self._refused.append(sequence)
                continue
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
                self.scheduler.cancel(sequence)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._refused)

    def counters(self) -> EngineCounters:
        """Cumulative counts and the present state."""
        return self.scheduler.counters()

    def step(self) -> list[Completion]:
        """Runs one step and returns the requests that it finished."""
        return [self.complete(sequence) for sequence in self.step_finished()]

    def step_finished(self) -> list[Sequence]:
        """Runs one step; the sequences that have ended, each to be given to `complete` once."""
        refused, self._refused = self._refused, []
        clock = [time.monotonic()]
        scheduled = self.scheduler.schedule()
        if not len(scheduled.slots):
            return refused
        clock.append(time.monotonic())
        step = self.runner.build_input(scheduled, self.scheduler.slots)
        clock.append(time.monotonic())
        hidden = self.runner.run(step)
        clock.append(time.monotonic())
        tokens = self._sample(hidden, step.sampled)
        clock.append(time.monotonic())
        self.scheduler.advance(scheduled)
        finished = self._finish(step.sampled, tokens)
        clock.append(time.monotonic())
        if self._record_steps:
            self._record(clock, scheduled, step, len(finished))
        return refused + finished

    def complete(self, sequence: Sequence) -> Completion:
        """The completion of a sequence that has ended, with its text. Thread-safe: nothing else uses the sequence."""
        request_id, output = sequence.request.request_id, sequence.output
        if sequence.error is not None:
            size = sequence.num_prompt_tokens
            return Completion(request_id, output, "", "error", size, 0, 0, 0.0, 0.0, 0.0, *sequence.error)
        text = sequence.stop_text
        if text is None:
            ended = sequence.finish_reason == "stop"
            text = self.tokenizer.decode(output[:-1] if ended else output)
        first_token_s, finished_s = sequence.first_token_s, sequence.finished_s
        assert sequence.first_scheduled_s is not None and first_token_s is not None and finished_s is not None
        return Completion(
            request_id=request_id,
            token_ids=output,
            text=text,
            finish_reason=sequence.finish_reason or "",
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_output_tokens=len(output),
            queue_wait_s=sequence.first_scheduled_s - sequence.arrival_s,
            time_to_first_token_s=first_token_s - sequence.arrival_s,
            time_per_token_s=(finished_s - first_token_s) / max(1, len(output) - 1),
        )

    @torch.inference_mode()
    def _sample(self, hidden: torch.Tensor, sampled: NDArray[np.int64]) -> NDArray[np.int64]:
        model, slots, num_rows = self.runner.model, self.scheduler.slots, len(sampled)
        tokens = np.empty(num_rows, np.int64)
        num_parts = -(-num_rows // model.max_head_rows)
        for i in range(num_parts):
            part = slice(i * num_rows // num_parts, (i + 1) * num_rows // num_parts)
            logits = model.logits(hidden[part])
            tokens[part] = sample(logits, sampling_rows(slots, sampled[part]), model.backend.argmax)
            del logits  # before the next ones are made
        return tokens

    def _finish(self, sampled: NDArray[np.int64], tokens: NDArray[np.int64]) -> list[Sequence]:
        """Appends each slot's token; the sequences that reached an end leave."""
        now, slots = time.monotonic(), self.scheduler.slots
        slots.append_tokens(sampled, tokens, now)
        is_eos = (tokens[:, None] == self.tokenizer.eos_token_ids).any(1) & ~slots.ignore_eos[sampled]
        is_full = slots.num_tokens[sampled] >= slots.max_total[sampled]
        finished = []
        for i in np.flatnonzero(is_eos | is_full | slots.needs_checks[sampled]).tolist():
            sequence = slots[int(sampled[i])]
            stopped = bool(is_eos[i])
            if slots.needs_checks[sampled[i]]:
                stopped |= _is_stopped(sequence, int(tokens[i]))
            if stopped or is_full[i]:
                sequence.finish_reason = "stop" if stopped else "length"
                sequence.finished_s = now
                self.scheduler.finish(sequence)
                del self._sequences[sequence.request.request_id]
                finished.append(sequence)
        return finished

    def _record(
        self, clock: list[float], scheduled: ScheduledStep, step: StepInput, num_finished: int
    ) -> None:
        schedule_s, build_s, forward_s, sample_s, finish_s = np.diff(clock).tolist()
        lens, starts = step.attention.seq_lens, step.attention.query_start_loc
        repeated = sum((g.num_sequences - 1) * g.num_blocks for g in step.attention.groups) * BLOCK_SIZE
        num_new, num_prefill = scheduled.num_new, int(starts[-1]) - scheduled.num_decodes
        counters = self.counters()
        self.step_records.append(
            StepRecord(
                start_s=clock[0],
                schedule_s=schedule_s,
                build_s=build_s,
                forward_s=forward_s,
                sample_s=sample_s,
                finish_s=finish_s,
                num_decode_tokens=scheduled.num_decodes,
                num_prefill_tokens=num_prefill,
                num_sampled=len(step.sampled),
                num_finished=num_finished,
                num_preempted=scheduled.num_preempted,
                num_running=counters.num_running,
                num_waiting=counters.num_waiting,
                num_blocks_used=counters.num_kv_blocks_used,
                context_tokens=int(lens.sum()),
                unique_context_tokens=int(lens.sum()) - repeated,
                num_query_keys=int((num_new * (lens - num_new) + num_new * (num_new + 1) // 2).sum()),
            )
        )

    def _max_total_tokens(self, request: Request) -> int:
        limit = self.info.max_request_tokens
        if request.sampling.max_tokens is not None:
            limit = min(limit, len(request.prompt_token_ids) + request.sampling.max_tokens)
        return limit

    def _problem(self, request: Request) -> tuple[str, str] | None:
        """(code, message) of a request that can't be run; None for the others."""
        size, room = len(request.prompt_token_ids), self.info.max_request_tokens
        if size == 0:
            return "empty_prompt", "the prompt has no tokens; the model needs at least one"
        if size >= self.info.context_size:
            limit = self.info.context_size
            return "prompt_too_long", f"{size} prompt tokens, the context holds {limit} with the output"
        if size >= room:
            message = f"{size} prompt tokens never fit the KV cache of {room}; shorten the prompt"
            return "request_too_large", message
        vocab_size = self.runner.model.config.vocab_size
        if max(request.prompt_token_ids) >= vocab_size:
            return "wrong_type", f"a prompt token id is beyond the vocabulary of {vocab_size}"
        return None


def _is_stopped(sequence: Sequence, token: int) -> bool:
    """Whether the token is a stop token of the row or completes one of its stop strings."""
    if token in sequence.request.sampling.stop_token_ids:
        return True
    if sequence.stop_checker is not None:
        sequence.stop_text = sequence.stop_checker.push(token)
    return sequence.stop_text is not None
