"""The host's memory: how much of it is free, and large tensors of which only a part may ever be used."""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")


def zeros_on_use(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when they are first written or read; torch.zeros writes them all at once."""
    size = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8, size)).view(dtype).view(shape)


def available_bytes() -> int:
    """Bytes free for use, the machine's or its control group's, whichever are less; 4 GiB where nothing says."""
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
