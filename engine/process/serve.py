"""The engine process: `python -m gristmill.engine.process.serve --fd N` runs one engine at the far end of a socket.

It owns the accelerator and the model, apart from the worker, so that a crash here costs rows in flight and no
more. The main thread steps; meanwhile a reader thread takes messages and a writer thread sends what is finished.
It ignores SIGINT (the worker decides) and dies with its parent. It knows nothing of jobs, shards or files.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, Generic, NoReturn, Protocol

from gristmill.engine.config import EngineOptions
from gristmill.engine.errors import ModelRefused
from gristmill.engine.null_engine import NullEngine, is_null_url
from gristmill.engine.process import protocol
from gristmill.engine.process.protocol import Message
from gristmill.engine.process.report_writer import F, Report, ReportWriter
from gristmill.engine.request import Completion, EngineCounters, EngineInfo, Request

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_ORPHANED = 3
PROGRESS_S = 0.25  # at least this often while the loop is alive; the worker's heartbeat depends on it

_BUSY_PROGRESS_S = 0.05  # steps that finish no row report no more often than this
_RECEIVE_BYTES = 1 << 18
# Rows are millions of objects and no cycles: few searches of the young ones for those, hardly any of all.
GC_THRESHOLDS = (50_000, 10, 1_000)
_SWITCH_S = 0.0005  # the other threads run Python, and a step takes the interpreter back after each kernel
_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_CHARS = 500

logger = logging.getLogger(__name__)


class SteppingEngine(Protocol[F]):
    """What this process needs of an engine; gristmill.engine.engine.Engine and NullEngine have it.

    `complete` is called from another thread than the rest, while the next step runs.
    """

    info: EngineInfo

    def add(self, requests: list[Request]) -> None: ...

    def cancel(self, request_ids: Iterable[int]) -> None: ...

    def step_finished(self) -> list[F]: ...

    def complete(self, finished: F, /) -> Completion: ...

    def has_work(self) -> bool: ...

    def counters(self) -> EngineCounters: ...


class EngineLoop(Generic[F]):
    """Messages in, steps, reports out. `report` may block."""

    def __init__(
        self, engine: SteppingEngine[F], inbox: SimpleQueue[Message], report: Callable[[Report[F]], None]
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._report = report
        self._last_progress_s = 0.0

    def run_once(self, now: Callable[[], float] = time.monotonic) -> None:
        """Takes every message there is, makes one step if there is work, reports. Idle: waits a little."""
        self._receive(0.0 if self._engine.has_work() else PROGRESS_S)
        finished = self._engine.step_finished() if self._engine.has_work() else []
        interval_s = _BUSY_PROGRESS_S if self._engine.has_work() else PROGRESS_S
        if finished or now() - self._last_progress_s >= interval_s:
            self._report(Report(self._engine.counters(), finished))
            self._last_progress_s = now()

    def _receive(self, timeout_s: float) -> None:
        try:
            message = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while True:
                self._apply(message)
                message = self._inbox.get_nowait()
        except Empty:
            return

    def _apply(self, message: Message) -> None:
        if message.kind == "add":
            self._engine.add(message.payload)
        elif message.kind == "cancel":
            self._engine.cancel(message.payload)
        else:
            raise protocol.ProtocolError(f"a message of kind {message.kind!r} is not for a loaded engine")


def load_engine(model: str, options: EngineOptions) -> SteppingEngine[Any]:
    """The engine for this model; only a real one imports torch. Raises ModelRefused."""
    if is_null_url(model):
        return NullEngine(model, options)
    from gristmill.engine.build import build_engine

    return build_engine(model, options)


def serve(inbox: SimpleQueue[Message], send: Callable[[bytes], None]) -> int:
    """Loads what the first message names and steps until something fails; the exit code of the process."""
    try:
        message = inbox.get()
        model, options = protocol.decode_load(message.payload)
        engine = load_engine(model, options)
        send(protocol.encode_loaded(engine.info))
        with closing(ReportWriter(engine.complete, send)) as writer:  # what is finished goes before a fatal
            loop = EngineLoop(engine, inbox, writer.put)
            while True:
                loop.run_once()
    except ModelRefused as error:
        return _report(send, EXIT_REFUSED, "refused", str(error))
    except MemoryError as error:
        return _report(send, EXIT_FAILED, "engine_failure", f"out of memory: {error}".removesuffix(": "))
    except Exception as error:  # the border of the process: whatever it is, the worker hears of it
        logger.exception("the engine failed")
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return _report(send, EXIT_FAILED, "engine_failure", f"{type(error).__name__}: {first_line}")


def _report(send: Callable[[bytes], None], exit_code: int, code: str, message: str) -> int:
    try:
        send(protocol.encode_fatal(code, message[:_MAX_MESSAGE_CHARS]))
    except OSError:
        logger.warning("the worker is gone; its engine could not report: %s", message[:_MAX_MESSAGE_CHARS])
    return exit_code


def read_messages(connection: socket.socket, inbox: SimpleQueue[Message]) -> NoReturn:
    """The reader thread: fills the inbox with decoded messages; a worker that sends never waits for a step to end.

    Ends the process, whatever the main thread does, when the worker says stop or is gone.
    """
    reader = protocol.MessageReader()
    try:
        while data := connection.recv(_RECEIVE_BYTES):
            for message in reader.feed(data):
                if message.kind == "stop":
                    os._exit(EXIT_STOPPED)
                inbox.put(protocol.decode_command(message))
    except ConnectionError:
        pass  # the worker is gone
    except protocol.ProtocolError as error:
        logger.error("the worker's messages can't be read: %s", error)
        os._exit(EXIT_FAILED)
    os._exit(EXIT_ORPHANED)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that spawned it ends, even while a call holds the GIL.

    The worker's spawning thread lives as long as this process (worker/engine/child.py). Other systems than
    Linux have the reader thread only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_ORPHANED)


def main() -> NoReturn:
    """Serves one engine until the socket ends; never returns."""
    parser = argparse.ArgumentParser(prog="python -m gristmill.engine.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="an inherited stream socket")
    parser.add_argument("--parent", type=int, help="process id of the worker; default: the parent")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(arguments.parent or os.getppid())
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_S)
    connection = socket.socket(fileno=arguments.fd)
    connection.set_inheritable(False)  # a grandchild holding it would hide this process's end from the worker
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=read_messages, args=(connection, inbox), name="reader", daemon=True).start()
    exit_code = serve(inbox, connection.sendall)
    sys.stderr.flush()
    os._exit(exit_code)  # no teardown: the reader thread is inside recv, and nothing here needs cleaning up
