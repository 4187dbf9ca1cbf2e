"""The messages between a worker and its engine process: 4-byte length, then msgpack [kind, payload].

To the engine: load, add, cancel, stop. From it: loaded, progress, completions, fatal. Rows travel in batches,
prompts and outputs as little-endian u32 bytes. Nothing here owns a socket: bytes in, messages out.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgpack  # type: ignore[import-untyped, unused-ignore]

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import EngineError
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request, SamplingParams

MAX_FRAME_BYTES = 256 << 20  # a longer one is a broken stream, or one prompt of 64 million tokens
BATCH_BYTES = 1 << 20  # rows are cut into messages of about this size

_LENGTH = struct.Struct("<I")
_ROW_BYTES = 64  # a row's other fields, roughly
_AddedRow = tuple[int, bytes, int, int, int]  # request_id, prompt, index of its sampling, seed, group


class ProtocolError(EngineError):
    """Bytes that are not a message, or a message over MAX_FRAME_BYTES."""


class Message(NamedTuple):
    """One decoded message; the payload holds plain values, arrays as tuples."""

    kind: str
    payload: Any


def encode_message(kind: str, payload: Any = None) -> bytes:
    """One message as bytes, length first. Lone surrogates (from a command line) survive the trip."""
    body: bytes = msgpack.packb((kind, payload), unicode_errors="surrogatepass")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {kind} message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}; send shorter rows"
        )
    return _LENGTH.pack(len(body)) + body


class MessageReader:
    """Cuts a stream of bytes into messages; keeps an incomplete one until the rest of it comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes. Raises ProtocolError when the stream makes no sense."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(view, start)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a message of {size} bytes exceeds the limit of {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + size
                if end > len(view):
                    break
                messages.append(_decode_body(view[start + _LENGTH.size : end]))
                start = end
        del self._buffer[:start]
        return messages


def _decode_body(body: memoryview) -> Message:
    try:
        kind, payload = msgpack.unpackb(body, use_list=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{len(body)} bytes that are not a [kind, payload] message: {error}") from error
    finally:
        body.release()
    return Message(kind, payload)


def encode_load(model: str, options: EngineOptions) -> bytes:
    """The first message to an engine: which model, with which options."""
    return encode_message("load", {"model": model, "options": _fields(options)})


def decode_load(payload: Any) -> tuple[str, EngineOptions]:
    """The inverse of encode_load."""
    return payload["model"], EngineOptions(**payload["options"])


def encode_add(requests: Iterable[Request]) -> Iterator[bytes]:
    """The requests as messages of about BATCH_BYTES; equal sampling parameters travel once a message."""
    indices: dict[SamplingParams, int] = {}
    rows: list[_AddedRow] = []
    num_bytes = 0
    last: SamplingParams | None = None
    index = 0
    for request in requests:
        if request.sampling is not last:  # a job's rows share one object: no hash for each row
            last = request.sampling
            index = indices.setdefault(last, len(indices))
        prompt = _to_bytes(request.prompt_token_ids)
        rows.append((request.request_id, prompt, index, request.seed, request.group))
        num_bytes += len(prompt) + _ROW_BYTES
        if num_bytes >= BATCH_BYTES:
            yield _encode_rows(indices, rows)
            indices, rows, num_bytes, last = {}, [], 0, None
    if rows:
        yield _encode_rows(indices, rows)


def _encode_rows(indices: dict[SamplingParams, int], rows: list[_AddedRow]) -> bytes:
    return encode_message("add", {"sampling": [_fields(params) for params in indices], "rows": rows})


def decode_command(message: Message) -> Message:
    """A message to the engine with the requests of an add decoded; raises ProtocolError."""
    if message.kind != "add":
        return message
    try:
        return Message("add", decode_add(message.payload))
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"an add message without requests: {error}") from error


def decode_add(payload: Any) -> list[Request]:
    """The requests of an add message."""
    sampling = [SamplingParams(**values) for values in payload["sampling"]]
    return [
        Request(request_id, _to_array(prompt), sampling[index], seed, group)
        for request_id, prompt, index, seed, group in payload["rows"]
    ]


def encode_completions(completions: Iterable[Completion]) -> Iterator[bytes]:
    """The completions as messages of about BATCH_BYTES."""
    rows: list[tuple[Any, ...]] = []
    num_bytes = 0
    for c in completions:
        tokens = _to_bytes(c.token_ids)
        rows.append((
            c.request_id, tokens, c.text, c.finish_reason, c.num_prompt_tokens, c.num_cached_tokens,
            c.num_output_tokens, c.queue_wait_s, c.time_to_first_token_s, c.time_per_token_s, c.error_code,
            c.error_message,
        ))  # fmt: skip
        num_bytes += len(tokens) + len(c.text) + _ROW_BYTES
        if num_bytes >= BATCH_BYTES:
            yield encode_message("completions", rows)
            rows, num_bytes = [], 0
    if rows:
        yield encode_message("completions", rows)


def decode_completions(payload: Any) -> list[Completion]:
    """The completions of a message."""
    return [Completion(row[0], _to_array(row[1]), *row[2:]) for row in payload]


def encode_loaded(info: EngineInfo) -> bytes:
    """The engine is ready: what it is."""
    return encode_message("loaded", _fields(info))


def decode_loaded(payload: Any) -> EngineInfo:
    """The inverse of encode_loaded."""
    return EngineInfo(**payload)


def encode_progress(counters: EngineCounters) -> bytes:
    """What the engine has counted so far."""
    return encode_message("progress", _fields(counters))


def decode_progress(payload: Any) -> EngineCounters:
    """The inverse of encode_progress."""
    return EngineCounters(**payload)


def encode_fatal(code: str, message: str) -> bytes:
    """code: refused (the model can't be run here) or engine_failure."""
    return encode_message("fatal", {"code": code, "message": message})


def _fields(value: EngineOptions | SamplingParams | EngineInfo | EngineCounters) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def _to_bytes(token_ids: array[int]) -> bytes:
    assert token_ids.typecode == "I", token_ids.typecode
    return token_ids.tobytes()  # both ends are one machine, and little-endian (x86-64, arm64)


def _to_array(data: bytes) -> array[int]:
    token_ids = array("I")
    token_ids.frombytes(data)
    return token_ids
