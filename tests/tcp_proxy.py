"""A TCP proxy that tests put before a server: it cuts, stalls and refuses connections, and loses replies.

It knows no protocol, so it stands before Redis, PostgreSQL and S3 alike.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from examples.cluster.server_process import HOST, free_ports

CHUNK_BYTES = 1 << 16
_POLL_S = 0.05


class Link:
    """One connection: the client's end and the server's."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.loses_reply = False
        self._is_over = threading.Lock()  # taken by whoever ends it first: no pump that wakes closes a reset

    def reset(self) -> None:
        if not self._is_over.acquire(blocking=False):
            return
        for end in self.ends:
            _reset(end)

    def close(self) -> None:
        """Ends both sides in peace: what was forwarded arrives."""
        if not self._is_over.acquire(blocking=False):
            return
        for end in self.ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class TcpProxy:
    """Forwards every connection to `target_port`. Methods may be called from any thread, in any order.

    `loses_reply_to` sees each chunk that a client sends before it is forwarded. Where it returns True, the server
    gets the chunk, and the connection is reset when the answer comes. (S3 answers "100 Continue" to the head of a
    PUT: there it is the chunk with the end of the body that counts.)
    """

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.loses_reply_to: Callable[[bytes], bool] = lambda chunk: False
        self.num_accepted = 0
        self.num_lost_replies = 0
        [self.port] = free_ports(1)
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._flowing = threading.Event()
        self._is_closed = False
        self._listener: socket.socket | None = None
        self.resume()

    def cut(self) -> int:
        """Resets every open connection; new ones are welcome. Returns how many there were."""
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.reset()
        return len(links)

    def stall(self) -> None:
        """Holds back every byte, of old and new connections, until `resume`: a network that is gone."""
        self._flowing.clear()

    def refuse(self) -> None:
        """Resets every connection and listens no more until `resume`: a server that is down."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def resume(self) -> None:
        self._flowing.set()
        with self._lock:
            if self._listener is not None:
                return
            self._listener = socket.create_server((HOST, self.port))
        _spawn(self._accept, self._listener)

    def close(self) -> None:
        self._is_closed = True
        self.refuse()
        self._flowing.set()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.num_accepted += 1
            _spawn(self._open, listener, client)

    def _open(self, listener: socket.socket, client: socket.socket) -> None:
        try:
            server = socket.create_connection((HOST, self.target_port), timeout=5)
        except OSError:
            _reset(client)
            return
        server.settimeout(None)
        link = Link(client, server)
        with self._lock:
            is_late = self._listener is not listener
            if not is_late:
                self._links.add(link)
        if is_late:
            link.reset()
            return
        _spawn(self._pump, link, server, client)
        self._pump(link, client, server)

    def _pump(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        """Copies one direction; the end of either one ends both."""
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                while not self._flowing.wait(_POLL_S) and not self._is_closed:
                    pass
                if source is link.ends[0]:
                    link.loses_reply |= self.loses_reply_to(chunk)
                elif link.loses_reply:
                    self.num_lost_replies += 1
                    link.reset()
                    break
                sink.sendall(chunk)
        with self._lock:
            self._links.discard(link)
        link.close()


def _spawn(run: Callable[..., None], *args: object) -> None:
    threading.Thread(target=run, args=args, daemon=True).start()


def _reset(end: socket.socket) -> None:
    """Ends a connection at once, unsent bytes and all, and wakes the thread that reads from it."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    end.close()


@contextmanager
def proxy_before(target_port: int) -> Iterator[TcpProxy]:
    """A proxy on a free port, closed at the end."""
    proxy = TcpProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
