"""Test devices in the processes of a worker that a chaos test starts: Python itself imports a file of this name.

TEST_HOST is the machine's name, so that only a lease tells whether a worker on another one is alive. TEST_ROW_LOG
gets a line for each row that a null engine begins: time, machine, process, prompt. While the file TEST_ILLNESS is
there, engines die at their next step: an ill machine. tests/integration/devices.py sets these and reads the log.
TEST_BROKER_WAIT_S is how long a worker waits for a message before it asks the broker again: one second otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any


def watch_rows(log: str, illness: str) -> None:
    """Puts the log and the illness before every step of the null engine."""
    from gristmill.engine.null_engine import NullEngine

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    run_step: Callable[[Any], Any] = NullEngine.step_finished

    def step(engine: Any) -> Any:
        if os.path.exists(illness):
            os.kill(os.getpid(), signal.SIGKILL)
        rows = list(islice(engine._waiting, engine._num_step_rows))
        texts = [bytes(token & 255 for token in row.prompt_token_ids).decode() for row, _ in rows]
        facts = (time.time(), socket.gethostname(), os.getpid())
        os.write(file, "".join(json.dumps([*facts, text]) + "\n" for text in texts).encode())
        return run_step(engine)

    NullEngine.step_finished = step  # type: ignore[assignment, method-assign]


def set_up() -> None:
    host = os.environ["TEST_HOST"]
    socket.gethostname = lambda: host
    if "gristmill.engine.process" in sys.orig_argv:
        watch_rows(os.environ["TEST_ROW_LOG"], os.environ["TEST_ILLNESS"])


def wait_for_messages(seconds: float) -> None:
    from kombu.transport.redis import Transport

    Transport.brpop_timeout = seconds  # type: ignore[assignment]


if "TEST_HOST" in os.environ:
    set_up()
if "TEST_BROKER_WAIT_S" in os.environ and "gristmill" in sys.orig_argv:
    wait_for_messages(float(os.environ["TEST_BROKER_WAIT_S"]))
