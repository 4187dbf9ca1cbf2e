"""One engine process and the thread that spawns it, feeds it, reads it and reaps it.

The thread lives as long as the process, because the kernel ties the child's death signal to the thread that
made it. It blocks on neither direction, so two full sockets can't wait for each other. A dead child is not
started again here: worker/engine/client.py decides that.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import IO, Any

from gristmill.engine.process import protocol
from gristmill.engine.request import EngineCounters, EngineInfo

_READ_BYTES = 1 << 18
_LINE_BYTES = 500  # what is kept of a line of the child's output
_TAIL_LINES = 20
_EXIT_WAIT_S = 1.0  # from the end of its stream to the end of the process; then it is killed
_JOIN_S = 5.0

logger = logging.getLogger(__name__)


class EngineChild:
    """A started engine process. `inbox` gets each completions payload, and None at the end.

    Its thread writes the public fields, anyone reads them; exit_code, failure and fatal_code are final once
    None is in the inbox, info once `settled` is set.
    """

    def __init__(self, load_message: bytes) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.settled = threading.Event()  # loaded, refused or dead
        self.info: EngineInfo | None = None
        self.counters = EngineCounters()
        self.last_message_s = time.monotonic()
        self.exit_code: int | None = None
        self.fatal_code: str | None = None
        self.failure = ""  # one line
        self.pid: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outbox: deque[bytes] = deque([load_message])
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        spawned = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(spawned,), name="engine-io", daemon=True)
        self._thread.start()
        spawned.wait()

    def send(self, frame: bytes) -> None:
        """Queues the bytes of a message; the thread sends them. To a dead child: nothing happens."""
        self._outbox.append(frame)
        with suppress(OSError):  # full: it is awake anyway; closed: the child is dead
            self._wake_sender.send(b"\0")

    def stop(self, timeout_s: float) -> None:
        """Asks the process to end, kills it after timeout_s, and returns when it is reaped."""
        self._outbox.clear()
        self.send(protocol.encode_message("stop"))
        self._thread.join(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL; returns when the process is reaped. Nothing happens to a dead one."""
        if self._process is not None:
            self._process.kill()
        self._thread.join(_JOIN_S)

    def _run(self, spawned: threading.Event) -> None:
        with ExitStack() as stack:
            # Last in, first out: whatever happens above, the reader of the inbox learns that this is the end.
            stack.callback(self.inbox.put, None)
            stack.callback(self.settled.set)
            stack.callback(spawned.set)
            stack.enter_context(self._wake_sender)
            stack.enter_context(self._wake_receiver)
            try:
                ours, theirs = socket.socketpair()
                with theirs:
                    stack.enter_context(ours)
                    process = stack.enter_context(_spawn(theirs.fileno()))
            except OSError as error:
                self.failure = f"the engine process could not be started: {error}"
                return
            stack.callback(process.kill)
            self._process, self.pid = process, process.pid
            spawned.set()
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            self._pump(ours, process.stdout)
            ours.close()
            self._reap(process, process.stdout)

    def _pump(self, connection: socket.socket, output: IO[bytes]) -> None:
        """Moves bytes both ways until the child's end of the connection is closed."""
        connection.setblocking(False)
        reader = protocol.MessageReader()
        unsent = memoryview(b"")
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ)
            while True:
                unsent = self._send_queued(connection, unsent)
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(connection, events)
                ready = {key.fileobj: events for key, events in selector.select()}
                if self._wake_receiver in ready:
                    self._wake_receiver.recv(4096)
                if output in ready and not self._read_output(output):
                    selector.unregister(output)
                if ready.get(connection, 0) & selectors.EVENT_READ and not self._receive(connection, reader):
                    return

    def _receive(self, connection: socket.socket, reader: protocol.MessageReader) -> bool:
        """Reads once; False at the end of the stream, or where it makes no sense any more."""
        try:
            data = connection.recv(_READ_BYTES)
            messages = reader.feed(data)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        except protocol.ProtocolError as error:
            self.failure = str(error)
            return False
        for message in messages:
            self._take(message)
        return bool(data)

    def _take(self, message: protocol.Message) -> None:
        self.last_message_s = time.monotonic()
        if message.kind == "completions":
            self.inbox.put(message.payload)
        elif message.kind == "progress":
            self.counters = protocol.decode_progress(message.payload)
        elif message.kind == "loaded":
            self.info = protocol.decode_loaded(message.payload)
            self.settled.set()
        elif message.kind == "fatal":
            self.fatal_code, self.failure = message.payload["code"], message.payload["message"]

    def _send_queued(self, connection: socket.socket, unsent: memoryview) -> memoryview:
        """Sends until the socket is full or the outbox empty; what is left of the message it was at."""
        try:
            while True:
                if not unsent:
                    unsent = memoryview(self._outbox.popleft())
                unsent = unsent[connection.send(unsent) :]
        except (IndexError, BlockingIOError):
            return unsent
        except ConnectionError:  # the end of the stream tells the rest
            self._outbox.clear()
            return memoryview(b"")

    def _read_output(self, output: IO[bytes]) -> bool:
        """Logs what the child printed; False at its end."""
        try:
            data = os.read(output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        for line in data.decode(errors="replace").splitlines():
            if line.strip():
                self._tail.append(line[:_LINE_BYTES])
                # Its errors come as EngineDied; a warning, of a slow path taken, would be heard nowhere else.
                level = logging.WARNING if line.startswith("WARNING ") else logging.INFO
                logger.log(level, "engine: %s", line[:_LINE_BYTES], extra={"engine_pid": self.pid})
        return bool(data)

    def _reap(self, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        try:
            process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._read_output(output)  # the rest, as much as a pipe holds
        self.exit_code = process.returncode
        if not self.failure:
            self.failure = _describe_exit(process.returncode, self._tail)


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    # The child imports from where this process does. -P: a user's file in the present folder that is named
    # like one of our modules, or Python's, is not imported instead.
    import_path = [entry or os.getcwd() for entry in sys.path]
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "gristmill.engine.process",
            "--fd",
            str(fd),
            "--parent",
            str(os.getpid()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,  # a library that prints must not reach the worker's own output
        stderr=subprocess.STDOUT,
        pass_fds=(fd,),
        process_group=0,  # Ctrl-C in a terminal reaches the worker only
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path)},
    )


def _describe_exit(exit_code: int, tail: deque[str]) -> str:
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (if nobody did that, the machine was out of memory)" if name == "SIGKILL" else ""
        return f"the engine process was killed by {name}{hint}"
    last = f": {tail[-1].strip()}" if tail else ""
    return f"the engine process exited with code {exit_code}{last}"
