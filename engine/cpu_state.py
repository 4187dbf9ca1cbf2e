"""What of the C++ kernels this machine has, for people who ask before a model is loaded. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

from gristmill.kernels.cpu import library as cpu_library
from gristmill.kernels.cpu.features import level_of_flags


class CpuState(NamedTuple):
    """level: the instruction set that the kernels would use; compiler: the one that would build them."""

    level: str
    is_built: bool
    compiler: str | None
    remedy: str  # when there is no compiler


def load_cpu_state(flags: frozenset[str]) -> CpuState:
    """The state for a CPU with these flags of /proc/cpuinfo."""
    level = level_of_flags(flags)
    is_built = level != "none" and cpu_library.is_built(level)
    return CpuState(level, is_built, cpu_library.find_compiler(), cpu_library.REMEDY)
