"""One `gristmill worker` as a child process, with the handles that chaos tests pull: signals, engines, its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from examples.cluster.child_process import start_child

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "gristmill")
UP = "the worker is up"
PATIENCE_S = 240.0  # for what has to happen some time, on a machine however busy


def wait_until(
    is_true: Callable[[], object],
    timeout_s: float,
    what: str,
    context: Callable[[], str] = str,
    poll_s: float = 0.05,
) -> None:
    """Polls until it is true; AssertionError says what did not happen, and the context of that moment."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{context()}"
        time.sleep(poll_s)


def is_alive(process: psutil.Process) -> bool:
    """Whether it is alive; an orphan that nobody has reaped yet is not."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class WorkerProcess:
    """A started worker. It ends with the test run at the latest."""

    def __init__(
        self,
        arguments: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        program: Sequence[str] = (*COMMAND, "worker"),
    ) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] = start_child(
            [*program, *arguments], log, death_signal=signal.SIGKILL, cwd=ROOT, env=env
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until_up(self, timeout_s: float = PATIENCE_S) -> None:
        """Returns when it serves; its model may still be loading."""
        self.wait_until_says(UP, timeout_s)

    def wait_until_says(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Returns when its log holds the text."""
        says = lambda: text in self.log_text()  # noqa: E731
        wait_until(lambda: says() or not self.is_running, timeout_s, text, self.log_text)
        assert says(), f"the worker ended with {self.process.poll()}: {self.log_text()[-2000:]}"

    def engines(self) -> list[psutil.Process]:
        """Its engine processes that are alive."""
        try:
            return [child for child in psutil.Process(self.pid).children(recursive=True) if is_alive(child)]
        except psutil.NoSuchProcess:
            return []

    def wait_for_engine(self, timeout_s: float = PATIENCE_S) -> psutil.Process:
        wait_until(self.engines, timeout_s, "the worker has an engine process")
        return self.engines()[0]

    def kill(self, engine_limit_s: float = 5.0) -> None:
        """SIGKILL, as a machine that is gone; then its engines have to go by themselves."""
        engines = self.engines()
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not any(map(is_alive, engines)), engine_limit_s, "orphaned engines end")

    def kill_engine(self) -> bool:
        """SIGKILL for its engine; False when it has none at this moment."""
        for engine in self.engines():
            with suppress(psutil.NoSuchProcess):
                engine.kill()
                return True
        return False

    def pause(self, with_engines: bool = False) -> None:
        """SIGSTOP: a worker that hangs, or (with its engines) a machine that sleeps."""
        os.kill(self.pid, signal.SIGSTOP)
        for engine in self.engines() if with_engines else []:
            engine.suspend()

    def unpause(self) -> None:
        for engine in self.engines():
            engine.resume()
        os.kill(self.pid, signal.SIGCONT)

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Asks it to end, as an operator does; its exit code."""
        self.process.send_signal(signal_number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        """The exit code once it ends by itself."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over within {timeout_s:g} s: {self.log_text()[-2000:]}") from None

    def close(self) -> None:
        """Ends it with its engines, whatever state they are in."""
        engines = self.engines()
        self.process.kill()
        self.process.wait()
        for engine in engines:
            with suppress(psutil.NoSuchProcess):
                engine.kill()
