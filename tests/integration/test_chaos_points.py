"""Figure 2: workers die at every crash point, one after the other, on each database and storage; no row is lost.

Exit code 137 proves that the point was reached. Each worker takes over what the one before it left behind, so a
death also meets the traces of the earlier ones; the last one finishes the job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from gristmill.jobs.crash_points import POINTS
from tests.integration.chaos import SHORT
from tests.integration.clean_run import assert_as_clean, num_rows_redone
from tests.integration.cluster import Cluster

ENDS = ("finalize.claimed", "finalize.checked", "manifest.before", "manifest.after", "complete.after")
SOME_POINTS = ("write.after", "commit.inside", "publish.before", "manifest.after")
RECOVERY_S = 13.0  # the lease and 10 s


def die_and_finish(cluster: Cluster, points: Sequence[str], num_rows: int, shard_rows: int) -> None:
    """A worker dies at each of the points: at the third time, where a job reaches it more than once."""
    expected = cluster.write_rows("in.jsonl", num_rows)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
    slowest_s = 0.0
    for point in points:
        doomed = cluster.start_worker(crash_at=point if point in ENDS else f"{point}:3")
        start = time.monotonic()
        assert doomed.wait(60.0) == 137, doomed.log_text()[-2000:]
        slowest_s = max(slowest_s, time.monotonic() - start)
        is_over = cluster.job(job_id)["state"] == "completed"
        assert is_over == (point == "complete.after"), f"{point}\n{cluster.describe()}"
    heir = cluster.start_worker()
    assert_as_clean(cluster, job_id, expected)
    assert heir.is_running and slowest_s < RECOVERY_S
    lost = [attempt for attempt in cluster.attempts(job_id) if attempt["outcome"] == "lost"]
    redone = num_rows_redone(cluster, job_id)
    print(f"figure 2: {len(points)} deaths at {len(points)} points: {len(lost)} shards lost, ", end="")
    print(f"{redone} of {num_rows} rows redone at most, each heir at its own point within {slowest_s:.1f} s")


@SHORT
def test_workers_that_die_at_some_points_cost_no_row(cluster: Cluster) -> None:
    die_and_finish(cluster, SOME_POINTS, num_rows=300, shard_rows=25)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_that_die_at_every_point_cost_no_row(cluster: Cluster) -> None:
    assert POINTS[-len(ENDS) :] == ENDS
    die_and_finish(cluster, POINTS, num_rows=5000, shard_rows=125)
