"""Builds the C++ kernels of kernels/cpu into one shared library per CPU level, caches it and loads it with ctypes.

A plain C ABI without torch's headers: it compiles in seconds and does not depend on torch's version. Where nothing can
be built the level is `none`, said once in the log; the torch implementations then do the work. Imports no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gristmill.kernels.cpu.features import cap_level, detect_level

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent / "src"
MAX_BUILD_S = 300
REMEDY = "install g++ 11 or later (Debian: apt-get install g++), or set CXX to a compiler"

# No -ffast-math: infinities mask attention scores, and a NaN must stay one.
_COMMON_FLAGS = (
    *("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wno-psabi"),
)
_LEVEL_FLAGS = {
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "avx512_bf16": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16"),
    "amx": ("-march=x86-64-v4", "-mprefer-vector-width=512", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
_LEVEL_MACROS = {
    "avx2": ("-DGRISTMILL_LANES=8",),
    "avx512": ("-DGRISTMILL_LANES=16",),
    "avx512_bf16": ("-DGRISTMILL_LANES=16", "-DGRISTMILL_BF16"),
    "amx": ("-DGRISTMILL_LANES=16", "-DGRISTMILL_BF16", "-DGRISTMILL_AMX"),
}


class CpuLibraryError(Exception):
    """The library can't be built or loaded; the message says why."""


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """The C++ kernels an engine runs with. library is None exactly at level `none`."""

    level: str
    library: ctypes.CDLL | None = None


NO_CPU_KERNELS = CpuKernels("none")


def load_cpu_kernels(cap: str = "auto") -> CpuKernels:
    """The kernels for this CPU, no higher than `cap` (cpu_features.CAPS); built now if they aren't in the cache."""
    level = cap_level(detect_level(), cap)
    if level == "none":
        return NO_CPU_KERNELS
    try:
        return CpuKernels(level, load_library(level))
    except CpuLibraryError as error:
        logger.warning("no C++ kernels, torch's are used and are slower: %s; %s", error, REMEDY)
        return NO_CPU_KERNELS


def load_library(level: str, emulate: bool = False) -> ctypes.CDLL:
    """The library for `level`, built if it isn't in the cache. Raises CpuLibraryError.

    emulate: the code of that level in instructions that any CPU with AVX2 has; slow, for tests.
    """
    path = build_library(level, emulate)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CpuLibraryError(f"{path} can't be loaded: {error}") from error


def build_library(level: str, emulate: bool = False) -> Path:
    """Where the library for `level` lies, after compiling it where it isn't in the cache. Raises CpuLibraryError."""
    flags, compiler = compile_flags(level, emulate), find_compiler()
    if compiler is None:
        # An image may have been built with a compiler that is gone since.
        built = _find_built(flags)
        if not built:
            raise CpuLibraryError("there is no C++ compiler")
        return built[-1]
    path = cache_folder() / f"{_hash_content(flags)}-{_hash([_run([compiler, '--version'])])}.so"
    if not path.exists():
        _compile(compiler, flags, path)
    return path


def is_built(level: str) -> bool:
    """Whether some compiler's library for `level` and these sources is in the cache."""
    return bool(_find_built(compile_flags(level)))


def compile_flags(level: str, emulate: bool = False) -> tuple[str, ...]:
    """The compiler's arguments for `level`, one of cpu_features.LEVELS but `none`."""
    if emulate:
        # -O1: split vectors in unrolled loops take the optimizer half a minute.
        return (*_COMMON_FLAGS, "-O1", *_LEVEL_FLAGS["avx2"], *_LEVEL_MACROS[level], "-DGRISTMILL_EMULATE")
    return (*_COMMON_FLAGS, *_LEVEL_FLAGS[level], *_LEVEL_MACROS[level])


def find_compiler() -> str | None:
    """The path of $CXX, else of g++ or c++; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++"]
    return next((path for path in map(shutil.which, names) if path), None)


def cache_folder() -> Path:
    """Where libraries are kept: gristmill/cpu in $XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "gristmill" / "cpu"


def _compile(compiler: str, flags: tuple[str, ...], path: Path) -> None:
    """All sources at once, then the link. Two processes may do so too: each renames a library of its own into place."""
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as pool:
            objects = [f"{folder}/{source.stem}.o" for source in sources]
            commands = [
                [compiler, *flags, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
            built = Path(folder) / path.name
            _run([compiler, *flags, "-shared", *objects, "-o", str(built)])
            built.replace(path)
    except OSError as error:
        raise CpuLibraryError(f"{path.parent} can't be written: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CpuLibraryError(f"{command[0]} can't be run: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CpuLibraryError(f"{command[0]} failed: {' | '.join(errors[:3])}")
    return done.stdout


def _find_built(flags: tuple[str, ...]) -> list[Path]:
    return sorted(cache_folder().glob(f"{_hash_content(flags)}-*.so"))


def _hash_content(flags: tuple[str, ...]) -> str:
    sources = (path for path in sorted(SOURCE_FOLDER.iterdir()) if path.suffix in (".cpp", ".h"))
    return _hash([*flags, *(path.name + path.read_text("utf-8") for path in sources)])


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main() -> None:
    """Builds for this CPU and says what came of it in one line; without a compiler too, since torch can do the work."""
    level, start = detect_level(), time.monotonic()
    if level == "none":
        print("cpu kernels: none, this CPU has no AVX2; torch's own are used")
        return
    try:
        path = build_library(level)
    except CpuLibraryError as error:
        print(f"cpu kernels: none for {level}, {error}; torch's own are used and are slower; {REMEDY}")
        return
    print(f"cpu kernels: {level}, ready after {time.monotonic() - start:.1f} s in {path}")


if __name__ == "__main__":
    main()
