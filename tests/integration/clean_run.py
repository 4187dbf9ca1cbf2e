"""What the chaos tests compare with, and what they count: the same rows in an undisturbed run, and the work redone."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from tests.integration.cluster import Cluster
from tests.integration.row_check import RowId, comparable
from tests.integration.worker_process import wait_until


@cache
def clean_rows(num_rows: int, max_tokens: int = 8) -> list[tuple[Any, ...]]:
    """The comparable rows of a quiet run over `Cluster.write_rows("in.jsonl", num_rows)` as Cluster.submit asks."""
    with tempfile.TemporaryDirectory(prefix="gristmill-clean-") as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'jobs.db'}"
        with closing(Cluster(folder, database_url=url, broker_url="", root=name)) as cluster:
            cluster.write_rows("in.jsonl", num_rows)
            order = ("--model", "null:", "--prompt", "{{ text }}", "--max-tokens", str(max_tokens))
            done = cluster.run("run", cluster.place("in.jsonl"), "--output", cluster.place("out"), *order)
            assert done.returncode == 0, done.stderr
            return comparable(cluster.place("out"))


def assert_as_clean(cluster: Cluster, job_id: str, expected: list[RowId], max_tokens: int = 8) -> None:
    """The output is whole, and row by row what an undisturbed run gives."""
    cluster.assert_whole(job_id, expected)
    output = str(cluster.job(job_id)["output"])
    assert comparable(output, cluster.s3) == clean_rows(len(expected), max_tokens)


def assert_survived(cluster: Cluster, job_id: str, expected: list[RowId]) -> None:
    """The same, and neither a job nor a shard nor a worker ever failed on the way."""
    assert_as_clean(cluster, job_id, expected)
    kinds = {event["kind"] for event in cluster.query("SELECT kind FROM events")}
    assert not [kind for kind in kinds if "fail" in kind], kinds
    assert "failed" not in {attempt["outcome"] for attempt in cluster.attempts(job_id)}
    assert all(worker.is_running for worker in cluster.workers), cluster.logs()


def num_rows_redone(cluster: Cluster, job_id: str) -> int:
    """The most rows that can have been computed again: those that lost attempts held and did not commit."""
    num_rows = {shard["shard_index"]: int(shard["num_rows"]) for shard in cluster.shards(job_id)}
    lost = [attempt for attempt in cluster.attempts(job_id) if attempt["outcome"] == "lost"]
    return sum(num_rows[attempt["shard_index"]] - int(attempt["rows_committed"]) for attempt in lost)


def num_overdue(cluster: Cluster, patience_s: float) -> int:
    """Running shards whose lease ended over patience_s ago; the database is on this machine, and so is its clock."""
    sql = "SELECT id FROM shards WHERE state = 'running' AND lease_until < :limit"
    return len(cluster.query(sql, limit=time.time() - patience_s))


def pass_time(seconds: float) -> None:
    """An outage that lasts, a fault that comes at a random moment: what a chaos test must wait for by the clock."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end, seconds + 5.0, "time passes")
