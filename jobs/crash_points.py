"""Moments at which tests let this process die or pause: GRISTMILL_CRASH_AT names one.

`commit.after` dies there at once (exit code 137, nothing is cleaned up), `commit.after:3` at the third time,
`commit.after!stop` stops the process (SIGSTOP) until somebody continues it. Without the variable, nothing.
"""

from __future__ import annotations

import os
import signal
import threading

POINTS = (
    *("claim.before", "claim.after", "put.before", "put.after", "write.after"),
    *("commit.before", "commit.inside", "commit.after", "publish.before", "publish.after", "mark.after"),
    *("finalize.claimed", "finalize.checked", "manifest.before", "manifest.after", "complete.after"),
)
SPOOL_POINTS = ("spool.inside", "spool.after", "spool.kept")  # only jobs that are regrouped come there

_lock = threading.Lock()
_counts: dict[str, int] = {}


def reach(point: str) -> None:
    """The process has come to `point`, one of POINTS or SPOOL_POINTS."""
    assert point in POINTS or point in SPOOL_POINTS, point
    wanted = os.environ.get("GRISTMILL_CRASH_AT")
    if wanted is None:
        return
    name, _, action = wanted.partition("!")
    name, _, number = name.partition(":")
    if name != point:
        return
    with _lock:
        _counts[point] = _counts.get(point, 0) + 1
        if _counts[point] != int(number or 1):
            return
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        os._exit(137)
