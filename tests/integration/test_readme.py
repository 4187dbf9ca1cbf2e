"""The README's commands and programs, run as they stand; only the models are `null:` and the places are the test's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from gristmill.jobs.storage.s3.client import s3_client

MODEL = "models/smollm2-135m-instruct.gguf"
EXAMPLES = ("submit_with_celery.py", "progress_with_psycopg.py", "submit_safely.py", "airflow_dag.py")
AIRFLOW = """
def task(**options):
    return lambda function: function

def dag(**options):
    return lambda function: function
"""


@pytest.fixture
def readme(repo_root: Path) -> str:
    """The README and the chapters behind it, in the order in which they are read."""
    chapters = ("README.md", "docs/queue.md", "docs/results.md", "docs/quantized-weights.md")
    return "\n".join((repo_root / chapter).read_text() for chapter in chapters)


def blocks(readme: str, language: str) -> list[str]:
    """The README's code blocks of one language, with `null:` for the model."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    return [text.replace(MODEL, "null:") for name, text in found if name == language]


def block(readme: str, language: str, words: str) -> str:
    """The one block that holds these words."""
    (found,) = (text for text in blocks(readme, language) if words in text)
    return found


def commands(shell: str) -> list[list[str]]:
    """The gristmill commands of a block, one a line, without the program's name."""
    lines = [shlex.split(line, comments=True) for line in shell.replace("\\\n", " ").splitlines()]
    assert {words[0] for words in lines} == {"gristmill"}
    return [words[1:] for words in lines]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_gristmill(folder: Path, words: list[str]) -> str:
    return run(folder, sys.executable, "-m", "gristmill", *words)


def run_python(folder: Path, code: str) -> str:
    return run(folder, sys.executable, "-c", code)


def test_the_readme_is_true(
    readme: str, tmp_path: Path, repo_root: Path, smollm2_path: str, _own_state_folder: Path
) -> None:
    """Its commands and programs in its order, in a fresh checkout after `make run`."""
    checkout = tmp_path / "checkout"
    (checkout / "models").mkdir(parents=True)
    shutil.copytree(repo_root / "examples", checkout / "examples")
    shutil.copy(repo_root / "pyproject.toml", checkout)
    words = [
        "run",
        "examples/tickets.jsonl",
        "--output",
        "out/tickets",
        "--model",
        "null:",
        "--prompt",
        "{{ body }}",
    ]
    run_gristmill(checkout, words)  # as `make run` does, which takes that folder
    for words in commands(block(readme, "", "gristmill run")):
        assert "285: " in run_gristmill(checkout, words), "the status of all rows"
    program = block(readme, "python", "gristmill.run")
    assert run_python(checkout, program).startswith("completed 275 10\n")
    (sql,) = blocks(readme, "sql")
    with sqlite3.connect(_own_state_folder / "gristmill" / "gristmill.db") as database:
        newest, _ = database.execute(sql).fetchall()
    assert newest[1:5] == ("completed", 285, 275, 10)


def test_the_readme_is_short_and_its_links_lead_somewhere(repo_root: Path) -> None:
    assert len((repo_root / "README.md").read_text().splitlines()) <= 150
    for chapter in (repo_root / "README.md", *repo_root.glob("docs/*.md"), repo_root / "ARCHITECTURE.md"):
        for target in re.findall(r"\]\(([^)#]+)", chapter.read_text()):
            assert (chapter.parent / target).exists(), f"{chapter.name} links to {target}"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readme_shows_the_files_of_examples(readme: str, repo_root: Path, name: str) -> None:
    assert f"```python\n{(repo_root / 'examples' / name).read_text()}```\n" in readme


def test_a_strangers_scripts_are_of_ten_lines(repo_root: Path) -> None:
    for name in EXAMPLES[:2]:
        assert len((repo_root / "examples" / name).read_text().splitlines()) <= 10


class Cluster:
    """The README's worker beside real servers; its programs run with the places of the test."""

    def __init__(self, readme: str, folder: Path, s3_root: str) -> None:
        self.folder = folder
        self.s3_root = s3_root
        self.readme = readme.replace("s3://tickets", s3_root)
        shell = commands(block(self.readme, "", "gristmill workers"))
        self.worker_words, self.submit_words, self.workers_words = shell

    def python(self, words: str, *changes: tuple[str, str], more: str = "", isolated: bool = False) -> str:
        """Runs the README's program that holds these words; isolated: in an interpreter without this repo."""
        code = block(self.readme, "python", words)
        for old, new in changes:
            assert old in code, old
            code = code.replace(old, new)
        flags = ["-I"] if isolated else []
        return run(self.folder, sys.executable, *flags, "-c", code + more)


@pytest.fixture
def cluster(
    readme: str,
    tmp_path: Path,
    repo_root: Path,
    redis_url: str,
    postgres_url: str,
    s3_root: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    monkeypatch.setenv("GRISTMILL_BROKER_URL", redis_url)
    monkeypatch.setenv("GRISTMILL_DATABASE_URL", postgres_url)
    monkeypatch.setenv("GRISTMILL_ALLOW_URIS", s3_root)
    tickets = (repo_root / "examples" / "tickets.jsonl").read_bytes()
    s3_client().put_object(Bucket=s3_root.removeprefix("s3://"), Key="in/tickets.jsonl", Body=tickets)
    cluster = Cluster(readme, tmp_path, s3_root)
    run_gristmill(tmp_path, ["migrate"])
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "gristmill", *cluster.worker_words],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=log,
            start_new_session=True,
        )
        try:
            yield cluster
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20) == 0, (tmp_path / "worker.log").read_text()
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def test_the_queue_of_the_readme_is_true(cluster: Cluster) -> None:
    no_repo = "\nimport sys\nassert 'gristmill' not in sys.modules"
    cluster.python("Submits a job. Needs only celery", more=no_repo, isolated=True)
    assert "285: " in run_gristmill(cluster.folder, cluster.submit_words), "the same key is the same job"
    progress = cluster.python("Prints how far a job is", more=no_repo, isolated=True).split()
    assert (progress[0][:4], progress[1:4]) == ("job_", ["completed", "285", "285"])
    assert "smollm2" in run_gristmill(cluster.folder, cluster.workers_words)
    listed = cluster.python("job = gristmill.submit")
    assert "completed 285 285" in listed
    assert listed.count("'completion': ") == 3


def test_the_recipes_of_the_readme_submit_each_job_once(cluster: Cluster) -> None:
    order = {
        "input": [f"{cluster.s3_root}/in/"],
        "output": f"{cluster.s3_root}/recipe-out",
        "model": "smollm2",
        "prompt": "{{ body }}",
        "idempotency_key": "recipe",
    }
    twice = f"\nprint(submit_safely({order!r}), submit_safely({order!r}))"
    first, second = cluster.python("def submit_safely", more=twice, isolated=True).split()
    assert first == second
    airflow = cluster.folder / "airflow"
    airflow.mkdir()
    (airflow / "__init__.py").touch()
    (airflow / "sdk.py").write_text(textwrap.dedent(AIRFLOW))
    cluster.python("airflow.sdk", ("{{ ds }}", "in"), ("time.sleep(15)", "time.sleep(0.5)"))
    listed = cluster.python("Prints how far a job is", ("tickets-1", "in"), isolated=True).split()
    assert listed[1:4] == ["completed", "285", "285"]
