"""The whole queue with real servers: submitted in each way, run by workers, every row once; and the harness itself."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.cluster.servers import PostgresServer, RedisServer, running
from tests.integration.chaos import SHORT
from tests.integration.cluster import Cluster
from tests.integration.row_check import check_rows, read_rows
from tests.tcp_proxy import proxy_before

# The same URL in every worker of a job: it is the model's fingerprint, and the first claim pins it.
SLOW = {"null": "null:?delay_ms=15"}


@pytest.mark.parametrize(
    "cluster",
    [
        ("sqlite", "local"),
        ("postgres", "s3"),
        pytest.param(("sqlite", "s3"), marks=pytest.mark.long),
        pytest.param(("postgres", "local"), marks=pytest.mark.long),
    ],
    indirect=True,
    ids="-".join,
)
def test_two_workers_run_what_a_plain_celery_client_submits_each_row_once(cluster: Cluster) -> None:
    expected = cluster.write_rows("in/a.jsonl", 60) + cluster.write_rows("in/b.jsonl", 45)
    for _ in range(2):
        cluster.start_worker({"null": "null:?delay_ms=5"}, is_awaited=False)
        cluster.send_submission("order-1", "in/", "out", shard_rows=10)  # the same key: one job
    job_id = cluster.wait_job("order-1")
    cluster.assert_whole(job_id, expected)
    progress = cluster.progress(job_id)
    assert (progress["rows"], progress["completed"], progress["shards_done"]) == (105, 105, 11)
    assert len(cluster.query("SELECT id FROM jobs")) == 1


@SHORT
def test_sigterm_hands_the_rows_back_at_once(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 150)
    first = cluster.start_worker(SLOW)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=150)
    cluster.wait_started(job_id)
    first.wait_for_engine()
    assert first.stop(signal.SIGTERM) == 0
    [shard] = cluster.shards(job_id)
    assert shard["state"] == "queued"
    cluster.start_worker(SLOW)
    cluster.assert_whole(job_id, expected)


def test_servers_that_crash_and_come_back_cost_no_row(tmp_path: Path) -> None:
    with (
        running(RedisServer) as redis,
        running(PostgresServer) as postgres,
        proxy_before(postgres.port) as proxy,
    ):
        (tmp_path / "data").mkdir()
        cluster = Cluster(
            tmp_path,
            database_url=postgres.url(port=proxy.port),
            reader_url=postgres.url(),
            broker_url=redis.url(),
            root=str(tmp_path / "data"),
        )
        with closing(cluster):
            expected = cluster.write_rows("in.jsonl", 300)
            worker = cluster.start_worker(SLOW)
            job_id = cluster.submit("in.jsonl", "out", shard_rows=20)
            cluster.wait_rows(job_id, 20)
            redis.stop()
            postgres.stop()
            postgres.start()
            redis.start()
            cluster.wait_rows(job_id, 100)
            proxy.cut()
            cluster.assert_whole(job_id, expected)
            assert worker.is_running


def test_the_example_cluster_runs_a_job_and_shows_its_rows(repo_root: Path) -> None:
    options = ["--model", "null:", "--rows", "12", "--shard-rows", "5"]
    command = [sys.executable, "-m", "examples.cluster", *options]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 rows, 0 failed" in done.stdout
    assert "out: 12 rows" in done.stdout and "T-10001" in done.stdout


@pytest.mark.parametrize("cluster", [("sqlite", "local"), ("sqlite", "s3")], indirect=True, ids="-".join)
def test_the_checker_finds_lost_doubled_and_unknown_rows(cluster: Cluster) -> None:
    lines = [f'{{"source": "s", "row_index": {i}, "completion": "x"}}\n' for i in (0, 1, 1, 7)]
    cluster.write("out/part-00000.jsonl", "".join(lines[:2]).encode())
    table = pa.Table.from_pylist([json.loads(line) for line in lines[2:]])
    pq.write_table(table, content := io.BytesIO())
    cluster.write("out/part-00001.parquet", content.getvalue())
    cluster.write("out/_attempts/00002-1-x.jsonl", b'{"source": "s", "row_index": 2}\n')
    report = check_rows(cluster.place("out"), [("s", 0), ("s", 1), ("s", 2)], cluster.s3)
    found = report.num_rows, report.lost, report.doubled, report.unknown
    assert found == (4, (("s", 2),), (("s", 1),), (("s", 7),))
    assert not report.is_whole and "1 lost (first ('s', 2))" in str(report)
    rows = read_rows(cluster.place("out"), cluster.s3)
    assert [row["row_index"] for row in rows] == [0, 1, 1, 7]
    assert check_rows(cluster.place("out"), [("s", i) for i in (0, 7)], cluster.s3).lost == ()
