"""kill -9 of the run and of its engine process, again and again, with the real model: every row once, the same text."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from gristmill.jobs.store.store import open_store
from tests.integration.row_check import COMPARED
from tests.integration.worker_process import COMMAND, is_alive

LIMIT_S = 240.0


def write_rows(folder: Path, examples: Path, num_rows: int) -> Path:
    """Rows with the beginnings of the example tickets, and now and then a broken one."""
    bodies = []
    for line in examples.read_bytes().splitlines():
        with suppress(ValueError, KeyError, TypeError):
            body = json.loads(line)["body"]
            if isinstance(body, str) and len(body) > 80:
                bodies.append(body[:160].encode("utf-8", "ignore").decode())
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(num_rows):
            row = {"custom_id": f"r{i}", "text": f"{i}. {bodies[i % len(bodies)]}"}
            file.write("{broken\n" if i % 41 == 40 else json.dumps(row) + "\n")
    return path


def run_command(source: Path, output: Path, model: str) -> list[str]:
    return [
        *(*COMMAND, "run", str(source), "--output", str(output), "--model", model),
        *("--prompt", "Say what this customer needs: {{ text }}", "--max-tokens", "8", "--dtype", "float32"),
        *("--shard-rows", "15", "--database-url", f"sqlite:///{output.parent / (output.name + '.db')}"),
    ]


def wait_until_rows_run(process: subprocess.Popen, output: Path) -> None:
    """Returns once the process has claimed a shard: its model is loaded and rows are in the engine."""
    url = f"sqlite:///{output.parent / (output.name + '.db')}"
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with open_store(url) as store:
            job = store.jobs.find(str(output))
            running = store.jobs.status(job.job_id) if job else None
            if running and running.owner and f"process {process.pid} " in running.owner:
                if running.shards.get("running"):
                    return
        time.sleep(0.05)
    pytest.fail(f"the run ended or hung before its rows ran: {process.poll()}")


def kill_and_check(process: subprocess.Popen, victim: str, chance: random.Random) -> None:
    """Kills the run or its engine. The engine never outlives the run by 2 s; the run outlives its engine."""
    engines = engines_of(process)
    if victim == "engine":
        os.kill(engines[0].pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.uniform(1.5, 3.5))
        assert process.poll() in (None, 0), "the run did not survive its engine's death"
        engines = psutil.Process(process.pid).children() if process.poll() is None else []
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2.0
    while any(map(is_alive, engines)):
        assert time.monotonic() < deadline, "the engine process outlived its parent by 2 s"
        time.sleep(0.05)


def engines_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The run's engine process; a run that goes on with a job holds it a moment before it starts one."""
    deadline = time.monotonic() + 10.0
    while not (engines := psutil.Process(process.pid).children(recursive=True)):
        assert time.monotonic() < deadline, "the run has no engine process"
        time.sleep(0.02)
    assert len(engines) == 1, engines
    return engines


def rows_of(output: Path) -> list[tuple]:
    """Every row of the folder: identity first, then what must not change."""
    table = [row for part in sorted(output.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    return [(row["row_index"], *(row[name] for name in COMPARED)) for row in table]


def check_kills(
    tmp_path: Path, repo_root: Path, model: str, num_rows: int, num_kills: int, max_wait_s: float
) -> None:
    source = write_rows(tmp_path, repo_root / "examples" / "tickets.jsonl", num_rows)
    calm = run_command(source, tmp_path / "calm", model)
    subprocess.run(calm, check=True, capture_output=True, timeout=LIMIT_S)
    expected = rows_of(tmp_path / "calm")
    assert [row[0] for row in expected] == list(range(num_rows))

    chance, output = random.Random(20), tmp_path / "killed"
    command = run_command(source, output, model)
    for i in range(num_kills):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            wait_until_rows_run(process, output)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=chance.uniform(0.1, max_wait_s))
            assert process.poll() is None, f"the job was over before kill {i + 1} of {num_kills}"
            kill_and_check(process, ("run", "engine")[i % 2], chance)
        present = [row[0] for row in rows_of(output)]
        assert len(set(present)) == len(present), "a row is doubled after a kill"
    subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
    assert rows_of(output) == expected
    assert json.loads((output / "_manifest.json").read_text())["totals"]["rows"] == num_rows


def test_a_kill_of_the_run_and_one_of_its_engine_lose_and_double_nothing(tmp_path, repo_root, smollm2_path):
    check_kills(tmp_path, repo_root, smollm2_path, num_rows=45, num_kills=2, max_wait_s=0.3)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_kills_lose_and_double_nothing(tmp_path, repo_root, smollm2_path):
    check_kills(tmp_path, repo_root, smollm2_path, num_rows=600, num_kills=10, max_wait_s=1.0)
