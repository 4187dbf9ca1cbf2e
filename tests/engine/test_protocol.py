"""The message format: every type survives the trip, at any cut of the stream; nonsense is refused."""

from __future__ import annotations

from array import array

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.process import protocol
from gristmill.engine.process.protocol import MessageReader, ProtocolError
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request, SamplingParams

GREEDY = SamplingParams(max_tokens=5)
PENALIZED = SamplingParams(
    temperature=0.7, top_k=4, stop=("dừng", "\n\n"), stop_token_ids=(1, 2), presence_penalty=0.5
)


def _read(data: bytes) -> list[protocol.Message]:
    return MessageReader().feed(data)


def _request(request_id: int, sampling: SamplingParams = GREEDY, size: int = 3) -> Request:
    return Request(
        request_id, array("I", [2**32 - 1] + [7] * (size - 1)), sampling, 2**64 - 1, request_id % 3
    )


def test_requests_survive_the_trip_and_equal_sampling_parameters_travel_once() -> None:
    stop = SamplingParams(stop=("\udce1",))  # a lone surrogate, of a command line
    sampling = [GREEDY, PENALIZED, SamplingParams(max_tokens=5), GREEDY, stop]
    requests = [_request(i, each) for i, each in enumerate(sampling)]
    (message,) = _read(b"".join(protocol.encode_add(requests)))
    assert message.kind == "add" and len(message.payload["sampling"]) == 3
    assert protocol.decode_add(message.payload) == requests


def test_many_long_requests_become_several_messages() -> None:
    requests = [_request(i, GREEDY if i % 2 else PENALIZED, size=100_000) for i in range(10)]
    frames = list(protocol.encode_add(requests))
    assert 2 <= len(frames) < 10
    decoded = [r for message in _read(b"".join(frames)) for r in protocol.decode_add(message.payload)]
    assert decoded == requests


def test_no_requests_are_no_message() -> None:
    assert list(protocol.encode_add([])) == []
    assert list(protocol.encode_completions([])) == []


def test_completions_and_errors_survive_the_trip() -> None:
    good = Completion(9, array("I", [70_000]), "xin chào \U0001f600", "stop", 4, 2, 1, 0.5, 0.75, 0.0)
    bad = Completion(10, array("I"), "", "error", 4, 0, 0, 0.5, 0.0, 0.0, "engine_failure", "it broke")
    (message,) = _read(b"".join(protocol.encode_completions([good, bad])))
    assert protocol.decode_completions(message.payload) == [good, bad]


def test_options_engine_info_and_counters_survive_the_trip() -> None:
    options = EngineOptions(dtype="float32", max_num_seqs=8, num_kv_blocks=40, enable_prefix_cache=False)
    info = EngineInfo("m", "float32", 2048, 2000, 125, 16, 64, 512, 1.5, "cpu", "avx2")
    counters = EngineCounters(num_steps=3, kv_waste_sum=0.25, num_running=2)
    load, loaded, progress = _read(
        protocol.encode_load("null:", options)
        + protocol.encode_loaded(info)
        + protocol.encode_progress(counters)
    )
    assert protocol.decode_load(load.payload) == ("null:", options)
    assert protocol.decode_loaded(loaded.payload) == info
    assert protocol.decode_progress(progress.payload) == counters


def test_messages_are_whole_at_any_cut_of_the_stream() -> None:
    stream = protocol.encode_message("cancel", [1, 2]) + protocol.encode_message("stop")
    for size in range(1, len(stream) + 1):
        reader = MessageReader()
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        messages = [message for piece in pieces for message in reader.feed(piece)]
        assert messages == [("cancel", (1, 2)), ("stop", None)]


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x01\x00\x00\x00\x07", b"\x02\x00\x00\x00\x07\x07"],
    ids=["too long", "not msgpack", "not a pair", "two values"],
)
def test_a_stream_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        _read(data)


def test_a_message_over_the_limit_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="limit of 100"):
        protocol.encode_message("add", b"x" * 101)
