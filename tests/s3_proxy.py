"""An HTTP proxy that tests put before the S3 server: it does to chosen requests what networks and servers do.

The request's Host header goes through, so signatures stay valid. It reads a whole body before it forwards it.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.cluster.server_process import HOST, free_ports

HOP_HEADERS = {"connection", "expect", "keep-alive", "transfer-encoding"}


class Fault(StrEnum):
    """What happens to a request."""

    INTERNAL_ERROR = "internal error"  # 500, not forwarded
    SLOW_DOWN = "slow down"  # 503, not forwarded
    RESET = "reset"  # the connection, before anything is forwarded
    SILENCE = "silence"  # no answer until the client or the proxy gives up
    LOST_REPLY = "lost reply"  # carried out, then the connection is reset
    FLIP = "flip"  # a bit of the body: of a PUT or POST on the way in, else on the way out
    TRUNCATE = "truncate"  # the answer's body ends early


TRANSIENT = (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.SILENCE, Fault.LOST_REPLY)
# The fault of a request by its method and its path with the query; None: it goes through.
Choice = Callable[[str, str], Fault | None]


def no_fault(method: str, path: str) -> Fault | None:
    return None


def random_faults(share: float, seed: int, faults: tuple[Fault, ...] = TRANSIENT) -> Choice:
    """That share of all requests meets one of the faults, the same ones for the same seed and order."""
    chance, lock = random.Random(seed), threading.Lock()

    def choose(method: str, path: str) -> Fault | None:
        with lock:
            return chance.choice(faults) if chance.random() < share else None

    return choose


class S3Proxy:
    """Forwards to `target_port`; `choose` may be replaced at any time, and `counts` says what was done."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.choose: Choice = no_fault
        self.counts: Counter[str] = Counter()  # by fault; "" are the requests that went through
        self.requests: list[tuple[str, str]] = []  # method and path
        self.silence_s: float | None = None  # how long a silence lasts; None: until the client gives up
        self.silence_ends = threading.Event()
        self._lock = threading.Lock()
        [self.port] = free_ports(1)
        self._server = _Server((HOST, self.port), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def first(self, num: int, fault: Fault, method: str, part: str = "") -> None:
        """The first `num` requests of that method with `part` in their path meet the fault."""
        left = [fault] * num
        self.choose = lambda found, path: left.pop() if found == method and part in path and left else None

    def always(self, fault: Fault | None) -> None:
        """Every request meets the fault."""
        self.choose = lambda method, path: fault

    def note(self, method: str, path: str) -> Fault | None:
        """The fault of a request, counted."""
        fault = self.choose(method, path)
        with self._lock:
            self.requests.append((method, path))
            self.counts[fault or ""] += 1
        return fault

    def close(self) -> None:
        self.silence_ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: S3Proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Tests read no access log."""

    def handle_any(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.note(self.command, self.path)
        if fault is Fault.INTERNAL_ERROR:
            self._answer(500, b"<Error><Code>InternalError</Code></Error>")
        elif fault is Fault.SLOW_DOWN:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
        elif fault is Fault.RESET:
            self._reset()
        elif fault is Fault.SILENCE:
            proxy.silence_ends.wait(proxy.silence_s)
            self._reset()
        else:
            self._forward(body, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        if fault is Fault.FLIP and body:
            body, fault = _flip(body), None
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_HEADERS}
        server = HTTPConnection(HOST, self.server.proxy.target_port, timeout=60)
        try:
            server.request(self.command, self.path, body or None, headers)
            answer = server.getresponse()
            content = answer.read()
        except (OSError, HTTPException):
            self._reset()
            return
        finally:
            server.close()
        if fault is Fault.LOST_REPLY:
            self._reset()
        else:
            self._pass_on(answer, _flip(content) if fault is Fault.FLIP else content, fault)

    def _pass_on(self, answer: HTTPResponse, content: bytes, fault: Fault | None) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_HEADERS | {"content-length"}:
                self.send_header(name, value)
        size = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        if size is not None and answer.status != 204:
            self.send_header("Content-Length", size)
        self.end_headers()
        if fault is Fault.TRUNCATE:
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
        self.connection.close()


def _flip(content: bytes) -> bytes:
    """The same with one bit changed in the middle."""
    middle = len(content) // 2
    return content and content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


@contextmanager
def s3_proxy_before(target_port: int) -> Iterator[S3Proxy]:
    """A proxy on a free port, closed at the end."""
    proxy = S3Proxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
