"""What is installed and imported: one name, lazily resolved, typed from the spec, whatever lies beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import gristmill
from gristmill.jobs.fields import JobFields
from gristmill.jobs.spec import JobSpec

STRANGERS = ("kernels", "engine", "jobs", "worker", "migrations")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "gristmill", *STRANGERS)


def run(*words: str, folder: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A Python that sees the libraries of this environment, but no installed gristmill unless `path` holds one."""
    places = [str(path)] if path is not None else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*places, sysconfig.get_path("purelib")])}
    command = [sys.executable, "-S", *words]  # -S: without the .pth file of the editable install
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = repo_root / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / "copy" / name, symlinks=True, ignore=skipped)
        else:
            (folder / "copy").mkdir(exist_ok=True)
            shutil.copy(source, folder / "copy" / name)
    words = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    done = subprocess.run([sys.executable, *words], cwd=folder / "copy", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds what the wheel installs and nothing else."""
    folder = wheel.parent / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_takes_one_name_and_holds_all_files(wheel: Path, repo_root: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gristmill"}
    endings = (".py", ".cpp", ".h", ".txt", ".mako", ".html", "py.typed")
    wanted = {
        f"gristmill/{path.relative_to(repo_root)}"
        for name in STRANGERS
        for path in (repo_root / name).rglob("*")
        if path.name.endswith(endings)
    }
    assert wanted - set(names) == set()
    assert "gristmill/py.typed" in names


def test_it_runs_beside_folders_of_the_same_names(installed: Path, tmp_path: Path) -> None:
    for name in STRANGERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a stranger')\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = ["run", "rows.jsonl", "--output", "out", "--model", "null:"]
    database = ["--database-url", f"sqlite:///{tmp_path}/jobs.db"]
    done = run("-m", "gristmill", *words, *database, folder=tmp_path, path=installed)
    assert (done.returncode, "2: 2 completed" in done.stdout) == (0, True), done.stdout + done.stderr
    script = "import gristmill.kernels.dispatch, gristmill; print(gristmill.__file__)"
    done = run("-c", script, folder=tmp_path, path=installed)
    assert done.stdout.strip() == str(installed / "gristmill" / "__init__.py"), done.stderr


def test_the_engine_process_starts_from_a_checkout_that_is_not_installed(repo_root: Path) -> None:
    done = run("-m", "gristmill.engine.process", "--help", folder=repo_root)
    assert (done.returncode, "--fd" in done.stdout) == (0, True), done.stderr
    done = run("-c", "import gristmill", folder=repo_root.parent)
    assert "No module named 'gristmill'" in done.stderr, "the run above has met an installed one"


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("gristmill", {"torch", "pydantic", "sqlalchemy", "celery", "pyarrow", "typer"}),
        ("gristmill.engine.engine", {"pydantic", "sqlalchemy", "celery", "pyarrow", "typer", "boto3"}),
        ("gristmill.jobs.client", {"torch", "celery"}),
    ],
)
def test_an_import_loads_nothing_that_it_does_not_need(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_every_public_name_is_there() -> None:
    assert {name: getattr(gristmill, name).__name__ for name in gristmill.__all__} == {
        name: name for name in gristmill.__all__
    }
    assert set(gristmill.__all__) <= set(dir(gristmill))
    with pytest.raises(AttributeError, match="no_such_name"):
        gristmill.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def test_the_keyword_arguments_are_the_fields_of_the_spec() -> None:
    assert list(JobFields.__annotations__) == list(JobSpec.model_fields)
    required = {name for name, field in JobSpec.model_fields.items() if field.is_required()}
    assert JobFields.__required_keys__ == required


def test_a_type_checker_finds_a_misspelt_field(repo_root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import gristmill\n"
        "job: str = gristmill.submit(input=['a'], output='b', model='c', priority='high')\n"
        "gristmill.run(input='a', output='b', model='c', max_tokens=3)\n"
        "gristmill.submit(input=['a'], output='b', model='c', priorty='high')\n"
        "gristmill.run(input='a', output='b', model='c', on_null='maybe')\n"
    )
    words = ["-m", "mypy", "--no-error-summary", "--hide-error-context", str(script)]
    done = subprocess.run([sys.executable, *words], cwd=repo_root, capture_output=True, text=True)
    faults = [line.partition("script.py:")[2] for line in done.stdout.splitlines() if "error:" in line]
    assert [fault.split(":")[0] for fault in faults] == ["4", "5"], done.stdout + done.stderr
    assert "priorty" in faults[0] and "on_null" in faults[1]
