"""How much memory this process may still take: the machine's and its control group's, whichever is less."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Bytes free for use; 4 GiB where the system does not say."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return 4 << 30
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _number(path: Path) -> int | None:
    """The number in a control-group file; None where there is none or it says 'max'."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
