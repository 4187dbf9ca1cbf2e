"""Reports leave in the order of the steps, off their path, bounded, and an error comes back to who steps."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from contextlib import closing

import pytest

from gristmill.engine.process import protocol
from gristmill.engine.process.protocol import Message, MessageReader
from gristmill.engine.process.report_writer import MAX_REPORTS, Report, ReportWriter
from gristmill.engine.request import Completion, EngineCounters

LIMIT_S = 10.0


def _complete(request_id: int) -> Completion:
    return Completion(request_id, array("I", [65]), "A", "stop", 1, 0, 1, 0.0, 0.0, 0.0)


def _report(*request_ids: int) -> Report[int]:
    return Report(EngineCounters(num_output_tokens=max(request_ids)), list(request_ids))


def _read(data: list[bytes]) -> list[Message]:
    return MessageReader().feed(b"".join(data))


def _completed(messages: list[Message]) -> list[int]:
    payloads = [message.payload for message in messages if message.kind == "completions"]
    return [c.request_id for payload in payloads for c in protocol.decode_completions(payload)]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_report_is_progress_and_then_its_completions_in_the_order_of_the_steps() -> None:
    sent: list[bytes] = []
    with closing(ReportWriter(_complete, sent.append)) as writer:
        for i in range(1, 200, 2):
            writer.put(_report(i, i + 1))
    messages = _read(sent)
    assert [message.kind for message in messages] == ["progress", "completions"] * 100
    assert _completed(messages) == list(range(1, 201))
    progress = [protocol.decode_progress(message.payload) for message in messages[::2]]
    assert [counters.num_output_tokens for counters in progress] == list(range(2, 201, 2))


def test_completing_and_sending_do_not_hold_up_the_steps() -> None:
    names: list[str] = []
    proceed = threading.Event()

    def complete(request_id: int) -> Completion:
        names.append(threading.current_thread().name)
        proceed.wait(LIMIT_S)
        return _complete(request_id)

    sent: list[bytes] = []
    with closing(ReportWriter(complete, sent.append)) as writer:
        for i in range(1, 5):
            writer.put(_report(i))
        assert not sent
        proceed.set()
    assert _completed(_read(sent)) == [1, 2, 3, 4]
    assert set(names) == {"writer"}


def test_steps_wait_when_many_reports_are_unsent() -> None:
    proceed = threading.Event()
    sent: list[bytes] = []
    num_put = 0

    def send(data: bytes) -> None:
        proceed.wait(LIMIT_S)
        sent.append(data)

    def put_many(writer: ReportWriter[int]) -> None:
        nonlocal num_put
        for i in range(1, 101):
            writer.put(_report(i))
            num_put = i

    with closing(ReportWriter(_complete, send)) as writer:
        stepping = threading.Thread(target=put_many, args=(writer,))
        stepping.start()
        _wait_until(lambda: num_put >= MAX_REPORTS)
        time.sleep(0.05)
        assert num_put <= MAX_REPORTS + 1  # one is being sent
        proceed.set()
        stepping.join(LIMIT_S)
    assert _completed(_read(sent)) == list(range(1, 101))


def test_an_error_of_the_connection_reaches_the_steps_and_blocks_nothing() -> None:
    def send(data: bytes) -> None:
        raise BrokenPipeError("nobody reads")

    with (
        closing(ReportWriter(_complete, send)) as writer,
        pytest.raises(BrokenPipeError, match="nobody reads"),
    ):
        for i in range(1, 10_000):
            writer.put(_report(i))
            time.sleep(0.001)


def test_a_request_that_cannot_be_completed_is_an_error_and_later_reports_still_go() -> None:
    def complete(request_id: int) -> Completion:
        if request_id == 2:
            raise ValueError("no text")
        return _complete(request_id)

    sent: list[bytes] = []
    writer = ReportWriter(complete, sent.append)
    writer.put(Report(EngineCounters(), [1, 2, 3]))
    _wait_until(lambda: bool(sent))
    with pytest.raises(ValueError, match="no text"):
        writer.put(_report(4))
    writer.close()
    assert _completed(_read(sent)) == [1, 3]
