"""Figure 10: bytes that are damaged between a worker and S3 are noticed, and sent or fetched again."""

from __future__ import annotations

import signal

import pytest

from tests.integration.clean_run import assert_as_clean
from tests.integration.cluster import Cluster
from tests.integration.worker_process import wait_until
from tests.s3_proxy import Fault, S3Proxy, no_fault, random_faults

SLOW = {"null": "null:?delay_ms=10"}


class Damage:
    """A Choice: a share of the puts is flipped, of the reads of objects cut short, and of the parts' reads flipped."""

    def __init__(self, share: float) -> None:
        self._is_hit = random_faults(share, 10, (Fault.FLIP,))

    def __call__(self, method: str, path: str) -> Fault | None:
        is_read = method == "GET" and ("/in" in path or "/out/" in path) and "list-type" not in path
        if not (is_read or method == "PUT") or self._is_hit(method, path) is None:
            return None
        return Fault.TRUNCATE if is_read else Fault.FLIP


@pytest.mark.long
@pytest.mark.timeout(300)
def test_damaged_puts_and_broken_off_gets_cost_nothing(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    expected = faulty_s3.write_rows("in.jsonl", 5000)
    faulty_s3.start_worker()
    s3_proxy.choose = Damage(0.3)
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=100)
    assert_as_clean(faulty_s3, job_id, expected)
    num_flipped, num_cut = s3_proxy.counts[Fault.FLIP], s3_proxy.counts[Fault.TRUNCATE]
    assert num_flipped and num_cut
    print(f"figure 10: {num_flipped} puts with a flipped bit, {num_cut} gets cut short, 0 rows wrong")


@pytest.mark.long
def test_a_part_that_arrives_damaged_is_not_merged(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    """The second worker goes on from the first one's part, and fetches it until it has the committed bytes."""
    expected = faulty_s3.write_rows("in.jsonl", 300)
    first = faulty_s3.start_worker(SLOW)
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=300)
    faulty_s3.wait_for("SELECT id FROM shards WHERE rows_reported >= 50")
    assert first.stop(signal.SIGTERM) == 0
    [shard] = faulty_s3.shards(job_id)
    assert 0 < shard["part_rows"] < 300
    left = [Fault.FLIP] * 4
    s3_proxy.choose = lambda method, path: (
        left.pop() if method == "GET" and "/out/part-" in path and left else None
    )
    faulty_s3.start_worker(SLOW)
    faulty_s3.wait_done(job_id)
    assert not left
    assert_as_clean(faulty_s3, job_id, expected)


@pytest.mark.long
def test_a_job_waits_for_parts_that_cannot_be_read_at_the_end(faulty_s3: Cluster, s3_proxy: S3Proxy) -> None:
    expected = faulty_s3.write_rows("in.jsonl", 200)
    s3_proxy.choose = lambda method, path: (
        Fault.TRUNCATE if method == "GET" and "/out/part-" in path else None
    )
    worker = faulty_s3.start_worker()
    job_id = faulty_s3.submit("in.jsonl", "out", shard_rows=50)
    wait_until(lambda: "finalize waits" in worker.log_text(), 30.0, "it tried", faulty_s3.describe)
    assert faulty_s3.job(job_id)["state"] == "finalizing"
    s3_proxy.choose = no_fault
    assert_as_clean(faulty_s3, job_id, expected)
