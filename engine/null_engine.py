"""The engine behind `null:` models: no weights, no torch, text from a hash; for tests of load and failures.

`null:?delay_ms=2&failure_rate=0.01` delays each row and fails some. Tokens are the bytes of UTF-8. Of the
sampling parameters only max_tokens and ignore_eos count. Three keys are test devices: crash_on=TEXT kills the
process at a prompt that holds TEXT, hang_on=TEXT stops it for ever, load_ms lets loading take that long.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl

from gristmill.engine.config import BLOCK_SIZE, EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request

NULL_SCHEME = "null:"

_KEYS = ("delay_ms", "failure_rate", "crash_on", "hang_on", "load_ms")
_CONTEXT_SIZE = 1 << 20
_MAX_NUM_SEQS = 256
_MAX_STEP_S = 0.05  # delays: a step takes no more rows than fit, so that cancels and progress stay prompt
_ROWS_PER_S = 10_000.0
_FATAL_STEP_S = 0.1  # into a step: what the one before it finished is sent by then
_MIN_TEXT_TOKENS, _MAX_TEXT_TOKENS = 8, 32
_WORDS = (
    "amber anchor apple arrow autumn basket beacon bridge candle canyon cedar circle cloud copper coral "
    "cotton dawn delta desert ember falcon feather field forest garden glass grain granite harbor hazel "
    "hollow island ivory jasper kettle lantern leaf lemon maple marble meadow mill mirror morning needle "
    "north olive orchard paper pebble pine quartz quiet raven river saddle silver spruce stone summer "
    "thistle timber valley willow "
).split()


@dataclass(frozen=True, slots=True)
class NullSettings:
    """What the query of a `null:` URL says."""

    delay_s: float = 0.0
    failure_rate: float = 0.0
    crash_on: bytes = b""
    hang_on: bytes = b""
    load_s: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """The rate to plan with: there is nothing to learn."""
        return min(_ROWS_PER_S, 1.0 / self.delay_s) if self.delay_s else _ROWS_PER_S


def is_null_url(model: str) -> bool:
    """Whether a model is named null:, the engine without weights."""
    return model.startswith(NULL_SCHEME)


def parse_null_url(model: str) -> NullSettings:
    """The settings in the URL; raises ModelRefused for an unknown key or a value that makes no sense."""
    rest = model.removeprefix(NULL_SCHEME)
    if rest in ("", "?"):
        return NullSettings()
    try:
        if not rest.startswith("?"):
            raise ValueError(f"{rest!r} stands where '?key=value' was expected")
        values = parse_qsl(rest[1:], keep_blank_values=True, strict_parsing=True)
        settings = NullSettings()
        for key, value in values:
            settings = _with_value(settings, key, value)
    except ValueError as error:
        keys = ", ".join(_KEYS)
        raise ModelRefused(f"model {model!r}: {error}; the keys of a null: model are {keys}") from error
    return settings


def _with_value(settings: NullSettings, key: str, value: str) -> NullSettings:
    if key in ("crash_on", "hang_on"):
        if not value:
            raise ValueError(f"{key} needs a text")
        text = value.encode()
        return replace(settings, crash_on=text) if key == "crash_on" else replace(settings, hang_on=text)
    if key not in _KEYS:
        raise ValueError(f"unknown key {key!r}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{key}={value!r} is not a number") from None
    if key == "failure_rate":
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"failure_rate={value} is not within 0 and 1")
        return replace(settings, failure_rate=number)
    if not (math.isfinite(number) and number >= 0.0):
        raise ValueError(f"{key}={value} is not a time in milliseconds")
    if key == "delay_ms":
        return replace(settings, delay_s=number / 1000)
    return replace(settings, load_s=number / 1000)


class NullEngine:
    """Completes rows in the order of adding, up to max_num_seqs in a step."""

    def __init__(self, model: str, options: EngineOptions) -> None:
        self._settings = parse_null_url(model)
        context_size = min(_CONTEXT_SIZE, options.max_model_tokens or _CONTEXT_SIZE)
        self.info = EngineInfo(
            model=model,
            dtype="float32" if options.dtype == "auto" else options.dtype,
            context_size=context_size,
            max_request_tokens=context_size,
            num_kv_blocks=0,
            block_size=BLOCK_SIZE,
            max_num_seqs=options.max_num_seqs or _MAX_NUM_SEQS,
            max_num_batched_tokens=options.max_num_batched_tokens or context_size,
            load_s=self._settings.load_s,
            device="none",
        )
        self._num_step_rows = self.info.max_num_seqs
        if self._settings.delay_s > 0:
            fitting = int(_MAX_STEP_S / self._settings.delay_s)
            self._num_step_rows = max(1, min(self._num_step_rows, fitting))
        self._waiting: deque[tuple[Request, float]] = deque()
        self._counters = EngineCounters()
        time.sleep(self._settings.load_s)

    def add(self, requests: list[Request]) -> None:
        arrival = time.monotonic()
        self._waiting.extend([(request, arrival) for request in requests])

    def cancel(self, request_ids: Iterable[int]) -> None:
        ids = set(request_ids)
        self._waiting = deque(item for item in self._waiting if item[0].request_id not in ids)

    def has_work(self) -> bool:
        return bool(self._waiting)

    def counters(self) -> EngineCounters:
        return replace(self._counters, num_waiting=len(self._waiting))

    def step(self) -> list[Completion]:
        """Completes the next rows."""
        return [self.complete(finished) for finished in self.step_finished()]

    def complete(self, finished: Completion) -> Completion:
        """What a step finished, as it is: the text stands for the model's work."""
        return finished

    def step_finished(self) -> list[Completion]:
        """Completes the next rows, the text included: it stands for the model's work and is counted."""
        num_rows = min(self._num_step_rows, len(self._waiting))
        rows = [self._waiting.popleft() for _ in range(num_rows)]
        self._misbehave(rows)
        start = time.monotonic()
        if self._settings.delay_s > 0:
            time.sleep(self._settings.delay_s * num_rows)
        completions = [self._complete(request, start - arrival) for request, arrival in rows]
        before = self._counters
        self._counters = replace(
            before,
            num_steps=before.num_steps + 1,
            num_prompt_tokens=before.num_prompt_tokens + sum(c.num_prompt_tokens for c in completions),
            num_output_tokens=before.num_output_tokens + sum(c.num_output_tokens for c in completions),
        )
        return completions

    def _misbehave(self, rows: list[tuple[Request, float]]) -> None:
        for text, signal_number in (
            (self._settings.crash_on, signal.SIGKILL),
            (self._settings.hang_on, signal.SIGSTOP),  # also silences the threads that send
        ):
            if self._holds(rows, text):
                time.sleep(_FATAL_STEP_S)
                os.kill(os.getpid(), signal_number)

    def _holds(self, rows: list[tuple[Request, float]], text: bytes) -> bool:
        # The low byte of each u32 is the text; ids above 255 are markers, which no text holds.
        return bool(text) and any(text in request.prompt_token_ids.tobytes()[::4] for request, _ in rows)

    def _complete(self, request: Request, queue_wait_s: float) -> Completion:
        num_prompt_tokens = len(request.prompt_token_ids)
        seed = request.seed.to_bytes(8, "little", signed=request.seed < 0)
        room = self.info.context_size - num_prompt_tokens
        if room <= 0:
            limit = self.info.context_size
            message = f"{num_prompt_tokens} prompt tokens leave no room in a context of {limit} tokens"
            return _failed(request, queue_wait_s, "request_too_large", message)
        if self._settings.failure_rate and _fraction(seed) < self._settings.failure_rate:
            message = f"failed on purpose: failure_rate={self._settings.failure_rate:g}"
            return _failed(request, queue_wait_s, "null_failure", message)
        digest = hashlib.blake2b(request.prompt_token_ids.tobytes(), digest_size=16, salt=seed).digest()
        text, finish_reason = _text(digest, request.sampling.max_tokens, request.sampling.ignore_eos, room)
        return Completion(
            request.request_id,
            array("I", text.encode("utf-32-le")),  # ASCII: one u32 a byte
            text,
            finish_reason,
            num_prompt_tokens,
            0,
            len(text),
            queue_wait_s,
            queue_wait_s + self._settings.delay_s,
            0.0,
        )


def _text(digest: bytes, max_tokens: int | None, ignore_eos: bool, room: int) -> tuple[str, str]:
    """A few words that the digest chooses, 8 to 32 characters; with ignore_eos exactly max_tokens."""
    limit = room if max_tokens is None else min(max_tokens, room)
    text = " ".join([_WORDS[byte & 63] for byte in digest[:8]])
    if ignore_eos and max_tokens is not None:
        return (text * (limit // len(text) + 1))[:limit], "length"
    size = _MIN_TEXT_TOKENS + digest[8] % (_MAX_TEXT_TOKENS - _MIN_TEXT_TOKENS + 1)
    if size <= limit:
        return text[:size], "stop"
    return text[:limit], "length"


def _fraction(seed: bytes) -> float:
    return int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little") / 2**64


def _failed(request: Request, queue_wait_s: float, code: str, message: str) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=array("I"),
        text="",
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_output_tokens=0,
        queue_wait_s=queue_wait_s,
        time_to_first_token_s=0.0,
        time_per_token_s=0.0,
        error_code=code,
        error_message=message,
    )
