"""What an addition touches: each patch is applied to a copy, tried there by a check, its product files counted.

A patch that no longer applies is made anew: apply it by hand in a checkout, then `git diff -U2`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ADDITIONS = sorted(path.stem for path in HERE.glob("*.patch"))
PACKAGES = ("engine", "gristmill", "jobs", "kernels", "migrations", "worker")
MAX_FILES = 3


def touched_files(patch: Path) -> set[str]:
    """The files of the product that a patch changes or makes."""
    lines = patch.read_text(encoding="utf-8").splitlines()
    paths = {line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")}
    return {path for path in paths if path.split("/")[0] in PACKAGES}


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_works_and_touches_few_files(name: str, repo_root: Path, tmp_path: Path) -> None:
    touched = touched_files(HERE / f"{name}.patch")
    if name == "device":
        assert {path for path in touched if not path.startswith("kernels/oracle/")} == {"kernels/dispatch.py"}
    else:
        assert 0 < len(touched) <= MAX_FILES, touched
    for package in (*PACKAGES, "tests"):
        skipped = shutil.ignore_patterns("__pycache__", "benchmarks")
        shutil.copytree(repo_root / package, tmp_path / package, symlinks=True, ignore=skipped)
    subprocess.run(["git", "apply", str(HERE / f"{name}.patch")], cwd=tmp_path, check=True)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    words = [sys.executable, str(HERE / f"{name}_check.py")]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_kind_of_addition_is_here() -> None:
    kinds = {"architecture", "column_format", "device", "option", "sampling_parameter"}
    assert kinds <= set(ADDITIONS)
    assert {path.stem.removesuffix("_check") for path in HERE.glob("*_check.py")} == set(ADDITIONS)
