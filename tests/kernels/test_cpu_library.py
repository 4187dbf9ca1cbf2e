"""Detecting the CPU's level, building the library for it, its cache, and what happens where it can't be built."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gristmill.kernels.cpu import library as cpu_library
from gristmill.kernels.cpu.features import (
    LEVELS,
    cap_level,
    detect_level,
    has_level,
    level_of_flags,
    load_cpu_flags,
)
from gristmill.kernels.cpu.library import (
    SOURCE_FOLDER,
    CpuLibraryError,
    build_library,
    cache_folder,
    compile_flags,
    find_compiler,
    load_cpu_kernels,
    load_library,
)

V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
TINY_SOURCE = 'extern "C" __attribute__((visibility("default"))) int gm_lanes() { return GRISTMILL_LANES; }\n'
needs_avx2 = pytest.mark.skipif(detect_level() == "none", reason="this CPU has no AVX2")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def missing_for_kernel_tests() -> list[str]:
    """What this machine lacks, for which tests of the C++ kernels are skipped."""
    return [
        name
        for name, is_missing in (("AVX2", detect_level() == "none"), ("g++", shutil.which("g++") is None))
        if is_missing
    ]


def check_nothing_is_skipped_in_ci() -> None:
    """A skip of a kernel test is a skip here and a failure in CI: the kernels would be tested nowhere."""
    if missing := missing_for_kernel_tests():
        message = f"tests of the C++ kernels need {' and '.join(missing)}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def test_in_ci_no_test_of_the_kernels_is_skipped() -> None:
    check_nothing_is_skipped_in_ci()


def test_without_a_compiler_kernel_tests_skip_here_and_fail_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"need .*g\+\+"):
        check_nothing_is_skipped_in_ci()
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"need .*g\+\+"):
        check_nothing_is_skipped_in_ci()


@pytest.fixture
def tiny_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one small source and an empty cache: builds take no time."""
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY_SOURCE)
    monkeypatch.setattr(cpu_library, "SOURCE_FOLDER", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (frozenset(), "none"),
        (frozenset({"avx2"}), "none"),
        (V3, "avx2"),
        (V3 | {"avx512f"}, "avx2"),
        (V4, "avx512"),
        (V4 | {"amx_tile", "amx_bf16"}, "avx512"),
        (V4 | {"avx512_bf16"}, "avx512_bf16"),
        (V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "amx"),
    ],
)
def test_a_level_needs_all_its_flags(flags: frozenset[str], level: str) -> None:
    assert level_of_flags(flags) == level


def test_flags_come_from_proc_cpuinfo(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {' '.join(V3)}\nbugs\t: none\n")
    assert load_cpu_flags(cpuinfo) == V3 | {"fpu"}
    assert load_cpu_flags(tmp_path / "none") == frozenset()
    assert detect_level(tmp_path / "none") == "none"


def test_a_cap_only_lowers() -> None:
    assert cap_level("avx2", "auto") == "avx2"
    assert cap_level("avx2", "amx") == "avx2"
    assert cap_level("amx", "avx512") == "avx512"
    assert cap_level("amx", "none") == "none"
    with pytest.raises(ValueError, match="choose one of auto, amx"):
        cap_level("amx", "sse")
    assert has_level("amx", "avx512") and not has_level("avx2", "avx512")


@needs_avx2
@needs_compiler
def test_a_library_is_built_once_and_again_when_a_source_changes(tiny_sources: Path) -> None:
    first = build_library("avx2")
    made = first.stat().st_mtime_ns
    assert build_library("avx2") == first and first.stat().st_mtime_ns == made
    assert load_library("avx2").gm_lanes() == 8
    assert load_library("amx", emulate=True).gm_lanes() == 16
    (tiny_sources / "tiny.cpp").write_text(TINY_SOURCE + "// changed\n")
    assert build_library("avx2") != first
    assert all(path.suffix == ".so" for path in cache_folder().iterdir())  # nothing half made is left


@needs_avx2
@needs_compiler
def test_two_builds_at_once_end_in_one_library(tiny_sources: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build_library("avx2"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4 and len(set(paths)) == 1
    assert list(cache_folder().iterdir()) == [paths[0]]


@needs_avx2
def test_without_a_compiler_the_level_is_none_and_the_log_says_so(
    tiny_sources: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert find_compiler() is None
    with caplog.at_level(logging.WARNING):
        kernels = load_cpu_kernels()
    assert (kernels.level, kernels.library) == ("none", None)
    assert len(caplog.messages) == 1
    assert "no C++ compiler" in caplog.messages[0] and "install g++" in caplog.messages[0]


@needs_avx2
@needs_compiler
def test_a_library_outlives_its_compiler(tiny_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_library("avx2")
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    assert build_library("avx2") == built


@needs_avx2
@needs_compiler
def test_a_failed_build_is_said_with_the_compilers_words(
    tiny_sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tiny_sources / "broken.cpp").write_text("int f() { return nowhere; }\n")
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels().level == "none"
    assert "nowhere" in caplog.messages[0]
    assert list(cache_folder().iterdir()) == []


@needs_avx2
@needs_compiler
def test_a_library_that_can_not_be_loaded_is_an_error(tiny_sources: Path) -> None:
    build_library("avx2").write_bytes(b"not a library")
    with pytest.raises(CpuLibraryError, match="can't be loaded"):
        load_library("avx2")


@needs_avx2
@needs_compiler
def test_a_cache_that_can_not_be_written_is_an_error(
    tiny_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CpuLibraryError, match="can't be written"):
        build_library("avx2")


def test_a_cap_of_none_builds_nothing(tiny_sources: Path) -> None:
    assert load_cpu_kernels("none").library is None
    assert not cache_folder().exists()


@needs_avx2
def test_the_command_says_in_one_line_what_came_of_it(repo_root: Path, tiny_sources: Path) -> None:
    command = [sys.executable, "-m", "gristmill.kernels.cpu.library"]
    env = {"PATH": "", "XDG_CACHE_HOME": str(cache_folder()), "HOME": str(tiny_sources)}
    done = subprocess.run(command, cwd=repo_root, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert "there is no C++ compiler" in done.stdout and "install g++" in done.stdout


@pytest.mark.parametrize("level", LEVELS[1:])
@needs_compiler
def test_every_source_compiles_for_every_level_with_its_instructions(level: str, tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    assembly = ""
    for source in SOURCE_FOLDER.glob("*.cpp"):
        out = tmp_path / f"{source.stem}.s"
        # -O1, with FMAs: what is looked at is which instructions there are, not how good the code is.
        subprocess.run(
            [
                compiler,
                *compile_flags(level),
                "-O1",
                "-fexpensive-optimizations",
                "-S",
                str(source),
                "-o",
                str(out),
            ],
            check=True,
        )
        assembly += out.read_text()
    assert "vfmadd" in assembly
    assert ("zmm" in assembly) == has_level(level, "avx512")
    assert ("vdpbf16ps" in assembly) == has_level(level, "avx512_bf16")
    assert ("tdpbf16ps" in assembly) == has_level(level, "amx")
