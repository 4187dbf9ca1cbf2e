"""Child processes that end with this process, also when it is killed: servers and workers start from here.

The kernel is asked to signal the child when the thread that started it is gone, so one thread starts them all,
and this file, run as a program in the child, asks for it before it becomes the child's program.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PR_SET_PDEATHSIG = 1


@functools.cache
def _starter() -> ThreadPoolExecutor:
    """The thread that starts children. It lives as long as the process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")


def start_child(
    command: Sequence[str],
    log: Path,
    *,
    death_signal: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
) -> subprocess.Popen[bytes]:
    """Starts the command in a session of its own, its output appended to `log`; its pid is the program's."""
    launcher = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(int(death_signal)), user or ""]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                [*launcher, *command],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return _starter().submit(start).result()


def become(parent: int, death_signal: int, user: str, command: list[str]) -> None:
    """Drops to `user`, asks for the signal and becomes the command."""
    if user:
        account = pwd.getpwnam(user)
        os.setgroups([])
        os.setgid(account.pw_gid)
        os.setuid(account.pw_uid)
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):  # Linux
        libc.prctl(PR_SET_PDEATHSIG, death_signal)
    if os.getppid() == parent:
        os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
