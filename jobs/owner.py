"""Who works on a shard: a process, named so exactly that a reused pid is never taken for it.

An owner that died on this host is seen at once; one on another host is known only by its lease.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: `host` (with its pid namespace), that host's boot, the pid, and its start in clock ticks."""

    host: str
    boot_id: str
    pid: int
    start_time: int

    def to_text(self) -> str:
        """One database column: `pid:start:boot:host`."""
        return f"{self.pid}:{self.start_time}:{self.boot_id}:{self.host}"

    @classmethod
    def from_text(cls, text: str) -> Owner:
        """The inverse of to_text."""
        pid, start_time, boot_id, host = text.split(":", 3)
        return cls(host=host, boot_id=boot_id, pid=int(pid), start_time=int(start_time))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition('/')[0]}"


def current_owner() -> Owner:
    """This process."""
    pid = os.getpid()
    return Owner(_host(), _boot_id(), pid, _start_time(pid) or 0)


def is_local(owner: Owner) -> bool:
    """Whether is_alive can tell: the owner ran on this host (in this pid namespace)."""
    return owner.host == _host()


def is_alive(owner: Owner) -> bool:
    """Whether a process of this host still runs: same boot, same pid, same start, and not a zombie."""
    if owner.boot_id != _boot_id():
        return False
    if not _PROC.joinpath("self/stat").exists():
        return _answers(owner.pid)
    return _start_time(owner.pid) == owner.start_time


def is_dead(owner: Owner) -> bool:
    """Whether it is certain that the owner is gone; of other hosts' owners only a lease tells."""
    return is_local(owner) and not is_alive(owner)


def _host() -> str:
    try:
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{namespace.strip('pid:[]')}"


def _boot_id() -> str:
    try:
        return _PROC.joinpath("sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, in clock ticks since the boot; None for a process gone or a zombie."""
    try:
        stat = _PROC.joinpath(str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    return None if fields[0] in "ZX" else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
