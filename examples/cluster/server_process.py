"""What the servers have in common: a folder, free ports, a start that waits, a stop as a crash is.

The servers are in servers.py, and how they end with this process is in child_process.py.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

import psutil

from examples.cluster.child_process import start_child

HOST = "127.0.0.1"
START_S = 90.0
# Below the range that the kernel gives to outgoing connections, so that a restart finds its port free.
PORTS = range(11_000, 32_000)


class MissingServerError(Exception):
    """The wheel with the server's program is not installed: skip here, fail in CI."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment; another process may still take one (start tries again)."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports in {PORTS}")


def wheel_file(package: str, *parts: str) -> Path:
    """A file inside an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingServerError(f"{package} is not installed: pip install -e '.[dev]'")
    return Path(spec.origin).parent.joinpath(*parts)


class Server(ABC):
    """One server process. `stop` is immediate, as a crash is; `start` after it comes back with the same data."""

    num_ports: ClassVar[int] = 1
    death_signal: ClassVar[int] = signal.SIGKILL  # what it gets when this process is gone
    not_ready: ClassVar[tuple[type[Exception], ...]] = (OSError,)  # what check_ready may raise

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.user: str | None = None  # to run as another user
        self.variables: dict[str, str] = {}  # for its environment
        self.ports = free_ports(self.num_ports)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports[0]

    @abstractmethod
    def command(self) -> list[str]:
        """The words that start it."""

    @abstractmethod
    def check_ready(self) -> None:
        """Raises what the client raises while the server cannot answer yet."""

    def start(self) -> Self:
        assert self.process is None, "it runs already"
        self.process = start_child(
            self.command(),
            self.folder / "server.log",
            death_signal=self.death_signal,
            cwd=self.folder,
            env={**os.environ, **self.variables},
            user=self.user,
        )
        self._wait_until_ready()
        return self

    def _wait_until_ready(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.check_ready()
                return
            except self.not_ready as error:
                last = error
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"{type(self).__name__} did not start: {last}\n{self.log_tail()}"
                ) from last
            time.sleep(0.05)

    def log_tail(self) -> str:
        return (self.folder / "server.log").read_text(errors="replace")[-3000:]

    def stop(self, signal_number: int = signal.SIGKILL, timeout_s: float = 20.0) -> None:
        """Ends the server at once; harmless when it does not run."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            self.unpause()  # a frozen process takes no signal but SIGKILL
        process, self.process = self.process, None
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal_number)
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def pause(self) -> None:
        """Freezes the server: connections stay open and nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def unpause(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, signal_number: int) -> None:
        """Signals also the children: each session of PostgreSQL is one, in a process group of its own."""
        assert self.process is not None
        server = psutil.Process(self.process.pid)
        for process in [server, *server.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
