"""Which instruction sets this CPU has, as one of a few levels that the C++ kernels are compiled for.

Read from /proc/cpuinfo when asked, never at import. Imports no torch: `gristmill doctor` uses it too.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

LEVELS = ("none", "avx2", "avx512", "avx512_bf16", "amx")  # each has all that the ones before it have
CAPS = ("auto", *reversed(LEVELS))

_FLAGS = {
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},  # x86-64-v3
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},  # x86-64-v4
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_tile", "amx_bf16"},
}
_ARCH_PRCTL = 158  # the number of the system call on x86-64
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def detect_level(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The highest level this CPU and kernel can run; `none` where it is not an x86-64 with AVX2.

    Asks Linux for the AMX tiles where the CPU has them: a process may not use them before.
    """
    level = level_of_flags(load_cpu_flags(cpuinfo)) if platform.machine() == "x86_64" else "none"
    if level == "amx" and not ask_for_tiles():
        return "avx512_bf16"
    return level


def level_of_flags(flags: frozenset[str]) -> str:
    """The highest level whose flags, and those of all levels below it, are among `flags`."""
    found = "none"
    for level in LEVELS[1:]:
        if not _FLAGS[level] <= flags:
            break
        found = level
    return found


def cap_level(level: str, cap: str) -> str:
    """`level`, but no higher than `cap`, one of CAPS; `auto` caps nothing."""
    if cap not in CAPS:
        raise ValueError(f"cpu_kernels is {cap!r}; choose one of {', '.join(CAPS)}")
    return level if cap == "auto" else min(level, cap, key=LEVELS.index)


def has_level(level: str, floor: str) -> bool:
    """Whether `level` is `floor` or higher."""
    return LEVELS.index(level) >= LEVELS.index(floor)


def load_cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's feature names as Linux spells them; empty where the file can't be read."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def ask_for_tiles() -> bool:
    """Asks Linux to let this process use AMX tile data; whether it may."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    asked = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return int(syscall(*asked)) == 0
