"""Figure 8: many workers and users of one SQLite file, and nobody hears that it is locked."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.chaos import SHORT
from tests.integration.clean_run import assert_as_clean
from tests.integration.cluster import Cluster

MODELS = {"null": "null:?delay_ms=2"}


@SHORT
def test_four_workers_share_a_sqlite_file(cluster: Cluster) -> None:
    share_file(cluster, num_workers=4, num_rows=400, shard_rows=10, num_looks=1)


@pytest.mark.long
@pytest.mark.timeout(300)
@SHORT
def test_eight_workers_share_a_sqlite_file(cluster: Cluster) -> None:
    assert share_file(cluster, num_workers=8, num_rows=5000, shard_rows=10, num_looks=10) == 8


def share_file(cluster: Cluster, num_workers: int, num_rows: int, shard_rows: int, num_looks: int) -> int:
    """The workers also make the file, all at once; meanwhile users submit jobs, look at them and list the workers.

    Returns how many workers had a share of the first job.
    """
    expected = cluster.write_rows("in.jsonl", num_rows)
    workers = cluster.start_workers(num_workers, MODELS)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    others = []
    for number in range(num_looks):
        others.append(
            cluster.submit("in.jsonl", f"other-{number}", shard_rows=shard_rows, limit=5 * shard_rows)
        )
        for command in (("status", job_id, "--json"), ("workers", "--json")):
            done = cluster.run(*command)
            assert (done.returncode, done.stderr) == (0, "")
    assert_as_clean(cluster, job_id, expected)
    for other_id in others:
        cluster.assert_whole(other_id, expected[: 5 * shard_rows])
    logs = "\n".join(worker.log_text() for worker in workers)
    assert "locked" not in logs and "WARNING" not in logs and "ERROR" not in logs, logs
    attempts = cluster.attempts(job_id)
    owners = Counter(attempt["owner"] for attempt in attempts if attempt["outcome"] == "done")
    assert owners.total() == num_rows // shard_rows
    # With a lease of 3 s a worker that gets neither a core nor the lock for so long loses it, and no row.
    num_lost = len(attempts) - owners.total()
    print(
        f"figure 8: {num_workers} workers, {owners.total()} shards and {len(others)} jobs beside them: ",
        end="",
    )
    print(f"{sorted(owners.values())} shards each, {num_lost} leases lost, nobody heard of a lock")
    return len(owners)
