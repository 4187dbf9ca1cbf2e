"""The engine process: the loop's order of work, what a failure says, and that it ends with its parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.null_engine import NullEngine
from gristmill.engine.process import protocol
from gristmill.engine.process import serve as process
from gristmill.engine.process.protocol import Message, MessageReader
from gristmill.engine.process.report_writer import Report, encode_report
from gristmill.engine.process.serve import EngineLoop, SteppingEngine
from gristmill.engine.request import Completion, Request, SamplingParams

OPTIONS = EngineOptions(max_num_seqs=1)
ORPHAN_LIMIT_S = 2.0


class Wire:
    """The messages of both directions, without a process."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.sent: list[Message] = []
        self.reader = MessageReader()

    def send(self, data: bytes) -> None:
        self.sent += self.reader.feed(data)

    def report(self, report: Report[Completion]) -> None:
        self.send(encode_report(*report))

    def put(self, *frames: bytes) -> None:
        for message in MessageReader().feed(b"".join(frames)):
            self.inbox.put(protocol.decode_command(message))

    def kinds(self) -> list[str]:
        return [message.kind for message in self.sent]


def _add(*request_ids: int) -> bytes:
    requests = [Request(i, array("I", [104, 105]), SamplingParams()) for i in request_ids]
    return b"".join(protocol.encode_add(requests))


def _completed(wire: Wire) -> list[int]:
    payloads = [message.payload for message in wire.sent if message.kind == "completions"]
    return [c.request_id for payload in payloads for c in protocol.decode_completions(payload)]


def test_adds_and_cancels_take_effect_at_the_next_step() -> None:
    wire = Wire()
    loop = EngineLoop(NullEngine("null:", OPTIONS), wire.inbox, wire.report)
    wire.put(_add(1, 2, 3))
    loop.run_once()
    wire.put(protocol.encode_message("cancel", [2]), _add(4))
    loop.run_once()
    loop.run_once()
    assert _completed(wire) == [1, 3, 4]


def test_progress_comes_before_the_completions_that_it_counts() -> None:
    wire = Wire()
    wire.put(_add(1))
    EngineLoop(NullEngine("null:", OPTIONS), wire.inbox, wire.report).run_once()
    assert wire.kinds() == ["progress", "completions"]
    assert protocol.decode_progress(wire.sent[0].payload).num_prompt_tokens == 2


def test_an_idle_loop_reports_progress_at_least_every_half_second() -> None:
    wire = Wire()
    loop = EngineLoop(NullEngine("null:", OPTIONS), wire.inbox, wire.report)
    start = time.monotonic()
    loop.run_once()
    loop.run_once()
    assert wire.kinds() == ["progress", "progress"]
    assert time.monotonic() - start < 2 * 0.5


class BusyEngine(NullEngine):
    """Works on and on without finishing a row."""

    def has_work(self) -> bool:
        return True

    def step_finished(self) -> list[Completion]:
        return []


def test_a_busy_loop_reports_progress_at_its_interval_not_at_each_step() -> None:
    wire = Wire()
    loop = EngineLoop(BusyEngine("null:", OPTIONS), wire.inbox, wire.report)
    for tick in range(100):
        loop.run_once(now=lambda tick=tick: 1000.0 + tick / 100)  # type: ignore[misc]
    assert 10 <= len(wire.sent) <= 25


class FailingEngine(NullEngine):
    """Fails at its first step with what the test says."""

    error: BaseException = RuntimeError("unset")

    def step_finished(self) -> list[Completion]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("the device\nwent away"), "RuntimeError: the device"),
        (MemoryError(), "out of memory"),
        (OSError(5, "input/output error"), "OSError: [Errno 5] input/output error"),
    ],
)
def test_any_exception_of_a_step_is_fatal_and_named_in_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FailingEngine, "error", error)
    monkeypatch.setattr(process, "load_engine", FailingEngine)
    wire = Wire()
    wire.put(protocol.encode_load("null:", OPTIONS), _add(1))
    assert process.serve(wire.inbox, wire.send) == 1
    assert wire.kinds() == ["loaded", "fatal"]
    assert wire.sent[-1].payload == {"code": "engine_failure", "message": text}


class FailingLaterEngine(NullEngine):
    """One row a step; its third step fails."""

    def step_finished(self) -> list[Completion]:
        if self.counters().num_steps == 2:
            raise RuntimeError("the device went away")
        return super().step_finished()


def test_what_was_finished_before_a_failure_is_sent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "load_engine", FailingLaterEngine)
    wire = Wire()
    wire.put(protocol.encode_load("null:", OPTIONS), _add(1, 2, 3))

    def send(data: bytes) -> None:
        time.sleep(0.05)  # the step fails while the first report is on its way
        wire.send(data)

    assert process.serve(wire.inbox, send) == process.EXIT_FAILED
    assert _completed(wire) == [1, 2]
    assert wire.kinds()[-1] == "fatal"


class IllegibleEngine(NullEngine):
    """Its second row can't be turned into text."""

    def complete(self, finished: Completion) -> Completion:
        if finished.request_id == 2:
            raise ValueError("token 70000 is not in the vocabulary")
        return finished


def test_a_row_that_cannot_be_completed_ends_the_engine_but_takes_no_other_row_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "load_engine", IllegibleEngine)
    wire = Wire()
    wire.put(protocol.encode_load("null:", EngineOptions(max_num_seqs=3)), _add(1, 2, 3))
    assert process.serve(wire.inbox, wire.send) == process.EXIT_FAILED
    assert _completed(wire) == [1, 3]
    assert wire.sent[-1].payload["message"] == "ValueError: token 70000 is not in the vocabulary"


def test_a_refused_model_is_reported_as_refused() -> None:
    wire = Wire()
    wire.put(protocol.encode_load("null:?nonsense=1", OPTIONS))
    assert process.serve(wire.inbox, wire.send) == 2
    (message,) = wire.sent
    assert message.payload["code"] == "refused"
    assert "unknown key 'nonsense'" in message.payload["message"]


def test_a_worker_that_is_gone_does_not_hide_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: str, options: EngineOptions) -> SteppingEngine[Completion]:
        raise ModelRefused(model)

    def send(data: bytes) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(process, "load_engine", refuse)
    wire = Wire()
    wire.put(protocol.encode_load("null:", OPTIONS))
    assert process.serve(wire.inbox, send) == 2


@contextmanager
def _engine_process(repo_root: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "gristmill.engine.process", "--fd", str(theirs.fileno())]
    with ours, subprocess.Popen(command, cwd=repo_root, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        try:
            yield child, ours
        finally:
            child.kill()


def _wait_for(connection: socket.socket, kind: str) -> None:
    reader = MessageReader()
    connection.settimeout(20)
    while data := connection.recv(1 << 16):
        if kind in [message.kind for message in reader.feed(data)]:
            return
    pytest.fail(f"the stream ended before {kind}")


def test_the_process_stops_at_once_also_while_it_loads(repo_root: Path) -> None:
    with _engine_process(repo_root) as (child, connection):
        connection.sendall(protocol.encode_load("null:?load_ms=60000", OPTIONS))
        connection.sendall(protocol.encode_message("stop"))
        assert child.wait(20) == process.EXIT_STOPPED


def test_the_process_ends_when_its_socket_does_also_within_a_step(repo_root: Path) -> None:
    with _engine_process(repo_root) as (child, connection):
        connection.sendall(protocol.encode_load("null:?delay_ms=60000", OPTIONS) + _add(1))
        _wait_for(connection, "loaded")
        connection.close()
        assert child.wait(ORPHAN_LIMIT_S) == process.EXIT_ORPHANED


@pytest.mark.parametrize("data", [b"\xff" * 16, protocol.encode_message("add", {"rows": [1]})])
def test_the_process_ends_at_a_stream_that_makes_no_sense(data: bytes, repo_root: Path) -> None:
    with _engine_process(repo_root) as (child, connection):
        connection.sendall(data)
        assert child.wait(20) == process.EXIT_FAILED


def test_ctrl_c_does_not_end_the_process(repo_root: Path) -> None:
    with _engine_process(repo_root) as (child, connection):
        connection.sendall(protocol.encode_load("null:", OPTIONS))
        _wait_for(connection, "loaded")
        child.send_signal(signal.SIGINT)
        connection.sendall(_add(1))
        _wait_for(connection, "completions")
        assert child.poll() is None


BUSY_CHILD = """
import os, sys
from gristmill.engine.process.serve import die_with_parent
die_with_parent(int(sys.argv[1]))
os.write(1, b"%d" % os.getpid())
sum(range(10**15))  # holds the GIL
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux only")
def test_a_child_that_holds_the_gil_dies_with_its_parent(repo_root: Path) -> None:
    command = [sys.executable, "-c", PARENT, BUSY_CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=repo_root, **pipes) as parent:  # type: ignore[call-overload]
        child = os.pidfd_open(int(os.read(parent.stdout.fileno(), 20)))
        parent.kill()
        assert _ends(child, ORPHAN_LIMIT_S)


def _ends(pidfd: int, timeout_s: float) -> bool:
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)
