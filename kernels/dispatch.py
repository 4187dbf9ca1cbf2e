"""Chooses the device's backend, once; says before that what this machine has. Imports no torch until it chooses.

A device is a line in DEVICES: its name, and the module whose `build_backend(cap)` returns its Backend.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from gristmill.kernels.cpu import library as cpu_library
from gristmill.kernels.cpu.features import CAPS, level_of_flags, load_cpu_flags

if TYPE_CHECKING:
    from gristmill.kernels.contract import Backend

DEVICES = {
    "cpu": "gristmill.kernels.cpu.backend",
}


def choose_backend(device: str = "auto", cap: str = "auto") -> Backend:
    """The backend of a device of DEVICES, `auto` being the CPU. Raises ValueError for a word that is not known.

    cap: the highest instruction set of our own kernels to use, one of CAPS; `auto` is GRISTMILL_CPU_KERNELS, if set.
    """
    cap = check_cap(cap)
    name = "cpu" if device == "auto" else device
    if name not in DEVICES:
        raise ValueError(f"no kernels for device {name!r}; this build runs on: {', '.join(DEVICES)}")
    backend: Backend = import_module(DEVICES[name]).build_backend(cap)
    return backend


def check_cap(cap: str) -> str:
    """The cap that counts: as told, else that of the environment. Raises ValueError for one that is not known."""
    if cap == "auto":
        cap = os.environ.get("GRISTMILL_CPU_KERNELS") or "auto"
    if cap not in CAPS:
        raise ValueError(f"GRISTMILL_CPU_KERNELS={cap!r} is not known; choose one of {', '.join(CAPS)}")
    return cap


def default_dtype() -> str:
    """What `--dtype auto` means here: bfloat16 where the CPU has AVX512-BF16 or AMX to multiply it, else float32."""
    return "bfloat16" if load_cpu_flags() & {"avx512_bf16", "amx_bf16"} else "float32"


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
