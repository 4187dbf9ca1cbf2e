"""Figures 9 and 10: an S3 whose requests fail, that is away for minutes, and that damages bytes on the way.

No job fails for it, every row is there once, and no multipart upload is left.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.clean_run import assert_survived, num_rows_redone, pass_time
from tests.integration.cluster import Cluster
from tests.integration.row_check import pending_uploads, read_rows
from tests.integration.worker_process import wait_until
from tests.s3_proxy import TRANSIENT, Choice, Fault, S3Proxy, random_faults

QUICK_FAULTS = tuple(fault for fault in TRANSIENT if fault is not Fault.SILENCE)
SLOW = {"null": "null:?delay_ms=10"}
Trigger = Callable[[str, str], bool]


class Outages:
    """A Choice: the server is away for `seconds` from the moment of each trigger's first request."""

    def __init__(self, seconds: float, *triggers: Trigger) -> None:
        self.seconds = seconds
        self.ends: list[float] = []
        self._triggers = list(triggers)

    def __call__(self, method: str, path: str) -> Fault | None:
        now = time.monotonic()
        if self.ends and now < self.ends[-1]:
            return Fault.RESET if len(path) % 2 else Fault.SLOW_DOWN
        if self._triggers and self._triggers[0](method, path):
            del self._triggers[0]
            self.ends.append(now + self.seconds)
            return Fault.RESET
        return None


def is_attempt(method: str, path: str) -> bool:
    return method == "PUT" and "/_attempts/" in path


def is_manifest(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith("/_manifest.json")


def test_a_fifth_of_all_requests_failing_costs_nothing(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    expected = faulty_s3.write_rows("in.jsonl", 100)
    faulty_s3.start_worker()
    s3_proxy.choose = random_faults(0.2, 9, QUICK_FAULTS)
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=50)
    assert_survived(faulty_s3, job_id, expected)


@pytest.mark.long
def test_an_outage_amid_the_parts_and_one_before_the_manifest_fail_nothing(
    faulty_s3: Cluster, s3_proxy: S3Proxy
) -> None:
    expected = faulty_s3.write_rows("in.jsonl", 200)
    faulty_s3.start_worker()
    s3_proxy.choose = outages = Outages(1.0, is_attempt, is_manifest)
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=50)
    faulty_s3.wait_done(job_id)
    assert len(outages.ends) == 2
    assert_survived(faulty_s3, job_id, expected)


@pytest.mark.long
@pytest.mark.timeout(580)
def test_a_fifth_of_all_requests_failing_in_each_way_costs_nothing(
    faulty_s3: Cluster, s3_proxy: S3Proxy
) -> None:
    """The first two silences last until the client's time-out of 60 s, later ones 3 s, as a gateway's might."""
    expected = faulty_s3.write_rows("in.jsonl", 5000)
    faulty_s3.start_workers(2, SLOW)
    s3_proxy.choose = random_faults(0.2, 9)
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=100)
    start = time.monotonic()
    wait_until(lambda: s3_proxy.counts[Fault.SILENCE] >= 2, 120.0, "two silences")
    s3_proxy.silence_s = 3.0
    faulty_s3.wait_done(job_id, 500.0)
    took_s = time.monotonic() - start
    assert_survived(faulty_s3, job_id, expected)
    counts = {str(fault) or "fine": count for fault, count in s3_proxy.counts.items()}
    assert all(s3_proxy.counts[fault] for fault in TRANSIENT)
    print(
        f"figure 9: requests {counts}, {took_s:.0f} s, {num_rows_redone(faulty_s3, job_id)} rows redone at most, ",
        end="",
    )
    print("0 failed jobs, 0 orphaned uploads")


@pytest.mark.long
@pytest.mark.timeout(580)
def test_an_outage_of_five_minutes_fails_no_job(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    expected = faulty_s3.write_rows("in.jsonl", 5000)
    faulty_s3.start_workers(2, SLOW)
    attempts = iter(range(10))
    s3_proxy.choose = outages = Outages(
        300.0, lambda method, path: is_attempt(method, path) and next(attempts, None) is None
    )
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=100)
    wait_until(lambda: outages.ends, 60.0, "the outage begins")
    pass_time(5.0)  # what was put before it is committed
    [before] = faulty_s3.query("SELECT sum(part_rows) AS rows FROM shards")
    faulty_s3.wait_rows(job_id, int(before["rows"]) + 1, 400.0)
    recovery_s = time.monotonic() - outages.ends[0]
    assert_survived(faulty_s3, job_id, expected)
    assert recovery_s < 60.0
    print(f"figure 9: an outage of 300 s: rows are committed again {recovery_s:.1f} s after it, ", end="")
    print(f"{num_rows_redone(faulty_s3, job_id)} rows redone at most, 0 failed jobs")


@pytest.mark.long
def test_an_upload_by_parts_whose_worker_is_killed_is_swept(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    """20 rows of 900,000 characters make a part of two uploads; the worker dies at the second."""
    expected = faulty_s3.write_rows("in.jsonl", 20)
    doomed = faulty_s3.start_worker()
    s3_proxy.choose = kill_at_part(2, doomed.pid)
    fields = {"output_format": "jsonl", "max_tokens": 900_000, "sampling": {"ignore_eos": True}}
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=20, **fields)
    assert doomed.wait(60.0) == -signal.SIGKILL
    assert len(pending_uploads(faulty_s3.place("out"), faulty_s3.s3)) == 1
    s3_proxy.choose = random_faults(0.2, 10, QUICK_FAULTS)
    faulty_s3.start_worker()
    faulty_s3.assert_whole(job_id, expected)  # also: no pending upload
    assert {len(row["completion"]) for row in read_rows(faulty_s3.place("out"), faulty_s3.s3)} == {900_000}


def kill_at_part(number: int, pid: int) -> Choice:
    def choose(method: str, path: str) -> Fault | None:
        if method == "PUT" and f"partNumber={number}&" in f"{path}&":
            os.kill(pid, signal.SIGKILL)
            return Fault.RESET
        return None

    return choose
