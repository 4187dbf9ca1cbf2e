"""Rows and machines that end the engine, and jobs that users stop: figures 13 and 14 of RELIABILITY.md."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import pytest

from tests.integration.chaos import LONG, SHORT, count_stale_commits
from tests.integration.cluster import Cluster
from tests.integration.devices import Devices
from tests.integration.row_check import RowId, read_files, read_rows
from tests.integration.worker_process import wait_until

DEADLY = {"null": "null:?delay_ms=15&crash_on=killer&hang_on=hanger"}
SLOW = {"null": "null:?delay_ms=15"}
CANCEL_S = 5.0
ENGINE_TIMEOUT_S = 1.0


def write_deadly_rows(cluster: Cluster, num_rows: int, deadly: Mapping[int, str]) -> list[RowId]:
    """in.jsonl, with these texts in place of some rows', and calm.jsonl, with harmless ones there."""
    texts = [f"row number {i}" for i in range(num_rows)]
    for name, changes in (("calm.jsonl", {}), ("in.jsonl", deadly)):
        rows = ({"text": changes.get(i, text)} for i, text in enumerate(texts))
        cluster.write(name, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return [(cluster.place("in.jsonl"), i) for i in range(num_rows)]


def load_facts(cluster: Cluster, output: str) -> dict[int, tuple[object, ...]]:
    """What must be equal, by row."""
    names = ("completion", "finish_reason", "completion_tokens", "error_code")
    rows = read_rows(cluster.place(output), cluster.s3)
    return {row["row_index"]: tuple(row[name] for name in names) for row in rows}


def check_deadly_rows(
    cluster: Cluster, num_rows: int, shard_rows: int, deadly: Mapping[int, str], num_workers: int
) -> None:
    """Rows that kill or hang the engine become `poisoned`, and every other row is as if they were not there."""
    expected = write_deadly_rows(cluster, num_rows, deadly)
    timeout = {"GRISTMILL_ENGINE_TIMEOUT_S": f"{ENGINE_TIMEOUT_S:g}"}
    cluster.start_workers(num_workers, {**DEADLY, "calm": "null:"}, env=timeout, args=("--max-models", "2"))
    calm_id = cluster.submit("calm.jsonl", "calm", model="calm")
    cluster.wait_done(calm_id)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    cluster.assert_whole(job_id, expected)
    calm, found = load_facts(cluster, "calm"), load_facts(cluster, "out")
    poisoned = {index for index, facts in found.items() if facts[-1] is not None}
    assert poisoned == set(deadly)
    assert {found[index][-1] for index in poisoned} == {"poisoned"}
    assert {i: facts for i, facts in found.items() if i not in deadly} == {
        i: facts for i, facts in calm.items() if i not in deadly
    }
    codes = cluster.query("SELECT error_code, rows FROM row_errors_by_code WHERE job_id = :id", id=job_id)
    assert codes == [{"error_code": "poisoned", "rows": len(deadly)}]
    num_deaths = len(cluster.query("SELECT id FROM events WHERE kind = 'engine_died'"))
    print(
        f"figure 13: {len(deadly)} of {num_rows} rows kill or hang the engine: {len(poisoned)} poisoned, every other"
        f" row done; {num_deaths} deaths of the engine in {cluster.progress(job_id)['elapsed_s']:.0f} s"
    )
    assert count_stale_commits(cluster, job_id) == 0
    assert len(cluster.running_workers()) == num_workers


def check_illness(cluster: Cluster, num_rows: int, shard_rows: int) -> None:
    """On a machine where engines die of anything the worker ends, and blames no row; another one does them all."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    devices = Devices(cluster.folder)
    ill = cluster.start_worker(SLOW, env=devices.environment())
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    cluster.wait_rows(job_id, shard_rows)
    devices.fall_ill()
    since = time.monotonic()
    assert ill.wait(120.0) == 1
    took_s = time.monotonic() - since
    assert cluster.job(job_id)["state"] == "in_progress"
    assert cluster.progress(job_id)["failed"] == 0
    [worker] = cluster.query("SELECT stopped_at, message FROM workers")
    assert worker["stopped_at"] is not None and "the engine dies whatever it is given" in worker["message"]
    assert "the engine dies whatever it is given" in ill.log_text()
    devices.recover()
    cluster.start_worker(SLOW, env=devices.environment())
    cluster.assert_whole(job_id, expected)
    assert cluster.progress(job_id)["failed"] == 0
    print(
        f"figure 13: an ill machine's worker ended with 1 after {took_s:.1f} s; rows blamed: 0 of {num_rows}"
    )


def cancel(cluster: Cluster, devices: Devices, job_id: str) -> tuple[float, float]:
    """`gristmill cancel`; from its end, the seconds until the job is cancelled, and the engine's last row of it."""
    done = cluster.run("cancel", job_id)
    assert done.returncode == 0, done.stderr
    since = time.time()
    cluster.wait_done(job_id, 30.0, state="cancelled")
    size, finished_s = devices.log_size, cluster.job(job_id)["finished_at"] - since
    wait_until(lambda: time.time() > since + CANCEL_S, 30.0, "any late row would have begun")
    late = devices.runs(size)
    assert not late, f"{len(late)} rows began after the job was cancelled"
    return finished_s, devices.runs()[-1].at - since


def resume(cluster: Cluster, job_id: str) -> str:
    done = cluster.run("resume", job_id)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().rpartition(" ")[2]


def check_stops(cluster: Cluster, num_rows: int, shard_rows: int, num_cancels: int, num_workers: int) -> None:
    """Cancelled and resumed: what was committed at a cancel is never computed again."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    devices = Devices(cluster.folder)
    for _ in range(num_workers):
        cluster.start_worker(SLOW, env=devices.environment())
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    took: list[float] = []
    num_kept = []
    kept: set[int] = set()
    size = 0

    def assert_kept() -> None:
        again = {run.row for run in devices.runs(size)} & kept
        assert not again, f"{len(again)} committed rows ran again"

    for i in range(num_cancels):
        cluster.wait_rows(job_id, num_rows * (i + 1) // (num_cancels + 2))
        assert_kept()
        took += cancel(cluster, devices, job_id)
        kept = {row["row_index"] for row in read_rows(cluster.place("out"), cluster.s3)}
        assert len(kept) == cluster.progress(job_id)["completed"] < num_rows
        assert cluster.check(job_id, expected).doubled == ()
        num_kept.append(len(kept))
        size = devices.log_size
        assert resume(cluster, job_id) == "in_progress"
        assert resume(cluster, job_id) in ("in_progress", "completed")  # rows may be faster
    cluster.assert_whole(job_id, expected)
    assert_kept()
    before = read_files(cluster.place("out"), cluster.s3), cluster.attempts(job_id), cluster.job(job_id)
    assert resume(cluster, job_id) == "completed"
    num_run = len(devices.runs())
    assert (
        read_files(cluster.place("out"), cluster.s3),
        cluster.attempts(job_id),
        cluster.job(job_id),
    ) == before
    assert count_stale_commits(cluster, job_id) == 0
    print(
        f"figure 14: {num_cancels} cancels of {num_rows} rows with {num_kept} committed: job and engine stopped after"
        f" {max(took):.1f} s at most (limit {CANCEL_S:g} s); committed rows that ran again: 0; rows begun {num_run}"
    )
    assert max(took) <= CANCEL_S


@SHORT
def test_a_row_that_kills_the_engine_is_quarantined(cluster: Cluster) -> None:
    check_deadly_rows(cluster, num_rows=40, shard_rows=20, deadly={10: "a killer"}, num_workers=1)


@SHORT
def test_a_cancelled_job_goes_on_where_it_was(cluster: Cluster) -> None:
    check_stops(cluster, num_rows=400, shard_rows=20, num_cancels=1, num_workers=1)


@LONG
@pytest.mark.long
@pytest.mark.timeout(900)
def test_deadly_rows_of_a_large_job_are_quarantined(cluster: Cluster) -> None:
    deadly = {7: "a killer", 1234: "a hanger", 2500: "a killer", 2510: "a killer", 4999: "a hanger"}
    check_deadly_rows(cluster, num_rows=5000, shard_rows=50, deadly=deadly, num_workers=2)


@LONG
@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_ill_machine_in_a_large_job_costs_no_row(cluster: Cluster) -> None:
    check_illness(cluster, num_rows=5000, shard_rows=50)


@LONG
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_large_job_that_is_cancelled_three_times_computes_nothing_twice(cluster: Cluster) -> None:
    check_stops(cluster, num_rows=5000, shard_rows=50, num_cancels=3, num_workers=2)
