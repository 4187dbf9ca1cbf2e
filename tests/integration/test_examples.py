"""The example files: each broken row ends as examples/README.md says. The null engine makes it quick."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from gristmill.engine.text.tokenizer import load_tokenizer

COMMAND = [sys.executable, "-c", "from gristmill.worker.cli.main import main; main()"]


def load_expected(repo_root: Path, section: str) -> dict[int, str]:
    """The README's table of one file: the error code (or completes, or no row) by line."""
    text = (repo_root / "examples" / "README.md").read_text(encoding="utf-8")
    table = text.split(f"## {section}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    return {int(line): result.strip("` ").split(":")[0].split(";")[0] for line, result in rows}


def run_example(repo_root: Path, folder: Path, name: str, *options: str) -> dict[int, str]:
    """The error codes, by line, of a run through the null engine; and every other line is a completion."""
    command = [*COMMAND, "run", f"examples/{name}", "--output", str(folder / "out"), "--model", "null:"]
    command += ["--max-tokens", "8", *options]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = ds.dataset(folder / "out", format="parquet").to_table()
    for row in table.to_pylist():
        assert (row["error_code"] is None) == (row["completion"] is not None), row
    indexes = table["row_index"].to_pylist()
    assert indexes == sorted(set(indexes))
    codes = zip(indexes, table["error_code"].to_pylist(), strict=True)
    return {index + 1: code or "completes" for index, code in codes}


@pytest.mark.parametrize(
    ("name", "section", "options"),
    [
        ("tickets.jsonl", "tickets.jsonl", ("--prompt", "{{ body }}")),
        ("chats.jsonl", "chats.jsonl", ("--messages", "messages")),
    ],
)
def test_every_broken_row_ends_as_the_readme_says(
    repo_root: Path, tmp_path: Path, name: str, section: str, options: tuple[str, ...]
) -> None:
    expected = load_expected(repo_root, section)
    num_lines = (repo_root / "examples" / name).read_bytes().count(b"\n")
    found = run_example(repo_root, tmp_path, name, *options)
    # The null engine's context holds the long row; the model's does not, see below.
    wanted = {line: "completes" if code == "prompt_too_long" else code for line, code in expected.items()}
    wanted = {line: wanted.get(line, "completes") for line in range(1, num_lines + 1)}
    assert found == {line: code for line, code in wanted.items() if code != "no row"}


def test_the_long_row_is_beyond_the_context_of_the_model(repo_root: Path, smollm2_path: str) -> None:
    lines = (repo_root / "examples" / "tickets.jsonl").read_bytes().split(b"\n")
    [line] = [k for k, code in load_expected(repo_root, "tickets").items() if code == "prompt_too_long"]
    [token_ids] = load_tokenizer(smollm2_path).encode_batch([json.loads(lines[line - 1])["body"]])
    assert len(token_ids) > 14_000


def test_the_tickets_are_many_and_partly_vietnamese(repo_root: Path) -> None:
    languages = []
    for line in (repo_root / "examples" / "tickets.jsonl").read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            languages.append(row["language"])
    assert len(languages) >= 240
    assert languages.count("vi") == 52
    assert len(set(languages) - {"en", "vi"}) == 13
