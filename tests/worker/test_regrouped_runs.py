"""`gristmill run` of rows that share prefixes out of order: sorted, killed, retried; each row once, the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PROMPT = "{{ document }} {{ question }}"
COMPARED = ("source", "row_index", "custom_id", "question", "completion", "error_code", "prompt_tokens")


def build_rows(num_rows: int, num_documents: int) -> list[dict[str, Any]]:
    documents = [random.Random(i).randbytes(150).hex() for i in range(num_documents)]
    rows = [
        {"custom_id": f"c{i}", "document": documents[i % num_documents], "question": f"question {i}"}
        for i in range(num_rows)
    ]
    random.Random(2).shuffle(rows)
    return rows


def read(kit: Any, output: Path) -> list[tuple[Any, ...]]:
    rows = [tuple(row[name] for name in COMPARED) for row in kit.rows(output)]
    return sorted(rows, key=lambda row: row[:2])


def test_a_run_says_what_sorting_saves_and_gives_the_same_rows(
    kit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kit.write_jsonl(build_rows(2400, 240))
    order = {"prompt": PROMPT, "keep": ["question"], "shard_rows": 600}
    display = kit.new_display()
    assert kit.run(source, display, **order) == 0
    assert display.notes[1].startswith("regrouped by prefix: sample saves ")
    assert "sorted rows share" in capsys.readouterr().out
    assert not (kit.output / "_spool").exists()
    plain = kit.folder / "plain"
    assert kit.run(source, **order, output=str(plain), regroup="never") == 0
    assert read(kit, kit.output) == read(kit, plain)
    assert [row["row_index"] for row in kit.rows()] != list(range(2400))
    assert kit.run(source, kit.new_display(), **order, regroup="never") == 0  # the same job: nothing to do


def test_failed_rows_of_a_regrouped_run_are_computed_again(kit: Any) -> None:
    source = kit.write_jsonl(["{broken", *build_rows(300, 20)])
    order = {"prompt": PROMPT, "model": "null:?failure_rate=0.1", "shard_rows": 50, "keep": ["question"]}
    assert kit.run(source, **order, regroup="always") == 0
    before = read(kit, kit.output)
    num_failed = sum(row[COMPARED.index("error_code")] is not None for row in before)
    assert num_failed > 5 and len(before) == 301
    display = kit.new_display()
    assert kit.resume(str(kit.output), display, retry=True) == 0
    assert f"{num_failed} failed rows are computed again" in display.notes[0]
    assert read(kit, kit.output) == before  # this model fails the same rows each time


def test_columns_of_parquet_keep_their_values_and_types(kit: Any) -> None:
    days = [date(2026, 1, 1 + i % 28) for i in range(200)]
    moments = pa.array(range(200), pa.timestamp("ms", "Europe/Berlin"))
    columns = {
        "text": [f"{i % 7}" for i in range(200)],
        "day": days,
        "moment": moments,
        "price": [Decimal(i) / 4 for i in range(200)],
        "ratio": pa.array([i / 10 for i in range(200)], pa.float32()),
        "nested": [[{"a": i}] for i in range(200)],
    }
    source = kit.write_parquet(columns)
    order = {
        "prompt": "{{ text }} {{ day }} {{ moment }} {{ price }} {{ ratio }} {{ nested }}",
        "keep": list(columns),
        "shard_rows": 50,
    }
    plain = kit.folder / "plain"
    assert kit.run(source, **order, regroup="always") == 0
    assert kit.run(source, **order, regroup="never", output=str(plain)) == 0
    assert sorted(kit.rows(), key=lambda row: row["row_index"]) == kit.rows(plain)
    schemas = {str(pq.read_schema(part)) for folder in (kit.output, plain) for part in folder.glob("part-*")}
    assert len(schemas) == 1


@pytest.mark.parametrize("points", [("spool.inside", "spool.after", "commit.after:3", "spool.kept")])
def test_a_run_that_dies_around_its_spool_loses_and_doubles_nothing(
    kit: Any, repo_root: Path, points: tuple[str, ...]
) -> None:
    source = kit.write_jsonl([*build_rows(300, 20), "{broken"])
    fields = {"prompt": PROMPT, "keep": ["question"], "shard_rows": 50}
    plain = kit.folder / "plain"
    assert kit.run(source, **fields, output=str(plain), regroup="never") == 0
    command = [
        *(sys.executable, "-m", "gristmill", "run", str(source), "--output", str(kit.output)),
        *("--model", "null:", "--prompt", PROMPT, "--keep", "question", "--max-tokens", "16"),
        *("--shard-rows", "50", "--regroup", "always"),
    ]
    for point in points:
        killed = subprocess.run(
            command, cwd=repo_root, env={**os.environ, "GRISTMILL_CRASH_AT": point}, capture_output=True
        )
        assert killed.returncode == 137, (point, killed.stderr)
    done = subprocess.run(command, cwd=repo_root, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert read(kit, kit.output) == read(kit, plain)
    with kit.store() as store:  # killed while it sorted, and gone on with: the same job
        assert len(store.jobs.of_output(str(kit.output))) == 1
    assert len(list((kit.output / "_spool").iterdir())) == 1  # the broken row's
