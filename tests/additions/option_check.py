"""`--suffix` puts a text behind each prompt; it is a part of the job's identity, and `submit` takes it too."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.dataset as ds

Path("rows.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (1, 5)))


def run(output: str, *words: str) -> list[int]:
    places = ["--output", output, "--database-url", "sqlite:///jobs.db"]
    command = ["run", "rows.jsonl", "--model", "null:", "--prompt", "{{ text }}", *places, *words]
    subprocess.run([sys.executable, "-m", "gristmill", *command], check=True)
    return ds.dataset(output).to_table()["prompt_tokens"].to_pylist()


assert run("plain") == [1, 5]
assert run("longer", "--suffix", " END") == [5, 9]
done = subprocess.run(
    [sys.executable, "-m", "gristmill", "submit", "--help"], check=True, capture_output=True, text=True
)
assert "--suffix TEXT" in done.stdout
