"""The whole queue with real servers: submitted in each way, run by workers, every row once; and the harness itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from examples.cluster.servers import PostgresServer, RedisServer, running
from tests.integration.cluster import Cluster
from tests.integration.row_check import check_rows, comparable, read_rows
from tests.tcp_proxy import proxy_before

ONE = pytest.mark.parametrize("cluster", [("postgres", "s3")], indirect=True)
EACH_PLACE = pytest.mark.parametrize(
    "cluster", [("sqlite", "local"), ("sqlite", "s3")], indirect=True, ids="-".join
)
SOME_PLACES = [("sqlite", "local"), ("postgres", "s3")]
OTHER_PLACES = [("sqlite", "s3"), ("postgres", "local")]
# The same URL in every worker of a job: it is the model's fingerprint, and the first claim pins it.
SLOW = {"null": "null:?delay_ms=15"}
LOCAL = pytest.mark.parametrize("cluster", [("sqlite", "local")], indirect=True)


@pytest.mark.parametrize("cluster", SOME_PLACES, indirect=True, ids="-".join)
def test_two_workers_run_a_job_each_row_once(cluster: Cluster) -> None:
    check_two_workers(cluster)


@pytest.mark.long
@pytest.mark.parametrize("cluster", OTHER_PLACES, indirect=True, ids="-".join)
def test_two_workers_run_a_job_each_row_once_also_elsewhere(cluster: Cluster) -> None:
    check_two_workers(cluster)


def check_two_workers(cluster: Cluster) -> None:
    expected = cluster.write_rows("in/a.jsonl", 60) + cluster.write_rows("in/b.jsonl", 45)
    for _ in range(2):
        cluster.start_worker({"null": "null:?delay_ms=5"})
    job_id = cluster.submit("in/", "out", shard_rows=10)
    cluster.wait_done(job_id)
    cluster.assert_whole(job_id, expected)
    progress = cluster.progress(job_id)
    assert (progress["rows"], progress["completed"], progress["shards_done"]) == (105, 105, 11)


@ONE
def test_a_plain_celery_client_submits(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 20)
    cluster.start_worker()
    for _ in range(2):  # the same key: one job
        cluster.send_submission("order-1", "in.jsonl", "out", shard_rows=5)
    job_id = cluster.wait_job("order-1")
    cluster.wait_done(job_id)
    cluster.assert_whole(job_id, expected)
    assert len(cluster.query("SELECT id FROM jobs")) == 1


@pytest.mark.long
@ONE
def test_a_killed_worker_costs_no_row_and_doubles_none(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 200)
    first = cluster.start_worker(SLOW)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=20)
    cluster.wait_rows(job_id, 20)
    first.kill()
    assert cluster.check(job_id, expected).doubled == ()
    cluster.start_worker(SLOW)
    cluster.wait_done(job_id)
    cluster.assert_whole(job_id, expected)


@LOCAL
def test_sigterm_hands_the_rows_back_at_once(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 400)
    first = cluster.start_worker(SLOW)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=400)
    cluster.wait_started(job_id)
    first.wait_for_engine()
    assert first.stop(signal.SIGTERM) == 0
    [shard] = cluster.shards(job_id)
    assert shard["state"] == "queued"
    cluster.start_worker(SLOW)
    cluster.wait_done(job_id)
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
            cluster.wait_done(job_id)
            cluster.assert_whole(job_id, expected)
            assert worker.is_running


def test_the_example_cluster_runs_a_job_and_shows_its_rows(repo_root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "examples.cluster",
        "--model",
        "null:",
        "--rows",
        "12",
        "--shard-rows",
        "5",
    ]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 rows, 0 failed" in done.stdout
    assert "out: 12 rows" in done.stdout and "T-10001" in done.stdout


@EACH_PLACE
def test_the_checker_finds_lost_doubled_and_unknown_rows(cluster: Cluster) -> None:
    lines = [f'{{"source": "s", "row_index": {i}, "completion": "x"}}\n' for i in (0, 1, 1, 7)]
    cluster.write("out/part-00000.jsonl", "".join(lines[:2]).encode())
    cluster.write("out/part-00001.jsonl", "".join(lines[2:]).encode())
    cluster.write("out/_attempts/00002-1-x.jsonl", b'{"source": "s", "row_index": 2}\n')
    report = check_rows(cluster.place("out"), [("s", 0), ("s", 1), ("s", 2)], cluster.s3)
    assert (report.num_rows, report.lost, report.doubled, report.unknown) == (
        4,
        (("s", 2),),
        (("s", 1),),
        (("s", 7),),
    )
    assert not report.is_whole and "1 lost (first ('s', 2))" in str(report)


@LOCAL
def test_the_checker_reads_parquet_and_compares_runs(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 3)
    output = cluster.folder / "local"
    source = cluster.folder / "in.jsonl"
    source.write_text("".join(f'{{"text": "row number {i}"}}\n' for i in range(3)))
    done = cluster.run(
        *("run", str(source), "--output", str(output), "--model", "null:", "--prompt", "{{ text }}"),
        *("--database-url", f"sqlite:///{cluster.folder / 'local.db'}"),
    )
    assert done.returncode == 0, done.stderr
    assert check_rows(str(output), [(str(source), i) for i in range(3)]).is_whole
    assert check_rows(str(output), expected).lost == tuple(expected)
    assert [row["row_index"] for row in read_rows(str(output))] == [0, 1, 2]
    assert comparable(str(output))[0][:2] == ("in.jsonl", 0)
