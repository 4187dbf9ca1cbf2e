"""The README's commands and programs, run as they stand; only the model is `null:`."""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

MODEL = "models/smollm2-135m-instruct.gguf"


def blocks(readme: str, language: str) -> list[str]:
    """The README's code blocks of one language, with `null:` for the model."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    return [text.replace(MODEL, "null:") for text in found]


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_is_true(tmp_path: Path, repo_root: Path, _own_state_folder: Path) -> None:
    readme = (repo_root / "README.md").read_text()
    shutil.copy(repo_root / "examples" / "tickets.jsonl", tmp_path)
    shell = next(text for text in blocks(readme, "") if "gristmill run" in text).replace("\\\n", " ")
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "gristmill"
        output = run(tmp_path, sys.executable, "-m", "worker.cli", *words[1:])
        assert "285: " in output, "the status of all rows"
    pandas, python = blocks(readme, "python")
    run(tmp_path, sys.executable, "-c", f"{pandas}\nassert len(pandas.read_parquet('out/tickets')) == 285")
    assert "285: " in run(tmp_path, sys.executable, "-c", f"{python}\nassert exit_code == 0")
    (sql,) = blocks(readme, "sql")
    with sqlite3.connect(_own_state_folder / "gristmill" / "gristmill.db") as database:
        ((_, state, num_rows, completed, failed),) = database.execute(sql).fetchall()
    assert (state, num_rows, completed + failed) == ("completed", 285, 285)
