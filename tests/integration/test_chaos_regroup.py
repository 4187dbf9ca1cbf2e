"""Workers that die while a job is regrouped, while it runs from its spool, and at its end: each row once, the same."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from gristmill.jobs.crash_points import SPOOL_POINTS
from tests.integration.cluster import Cluster
from tests.integration.row_check import comparable

NUM_ROWS = 400
POINTS = ("spool.inside", "spool.after", "write.after:2", "commit.inside:2", "publish.before:2", "spool.kept")
EACH_END = [("sqlite", "local"), ("postgres", "s3")]


def write_documents(cluster: Cluster) -> list[tuple[str, int]]:
    """Shuffled questions about 20 documents, and a line that is no row's."""
    documents = [random.Random(i).randbytes(150).hex() for i in range(20)]
    texts = [f"{documents[i % 20]} question {i}" for i in range(NUM_ROWS)]
    random.Random(4).shuffle(texts)
    lines = [json.dumps({"custom_id": f"c{i}", "text": text}) for i, text in enumerate(texts)]
    lines[17] = "{broken"
    place = cluster.write("in.jsonl", "".join(line + "\n" for line in lines).encode())
    return [(place, i) for i in range(NUM_ROWS)]


@pytest.mark.parametrize("cluster", EACH_END[:1], indirect=True, ids="-".join)
def test_workers_that_die_around_a_spool_cost_no_row(cluster: Cluster) -> None:
    die_and_finish(cluster, SPOOL_POINTS)


@pytest.mark.long
@pytest.mark.parametrize("cluster", EACH_END, indirect=True, ids="-".join)
def test_workers_that_die_at_any_point_of_a_regrouped_job_cost_no_row(cluster: Cluster) -> None:
    assert set(SPOOL_POINTS) <= set(POINTS)
    die_and_finish(cluster, POINTS)


def die_and_finish(cluster: Cluster, points: Sequence[str]) -> None:
    expected = write_documents(cluster)
    plain = cluster.submit("in.jsonl", "plain", regroup="never")
    cluster.start_worker()
    cluster.wait_done(plain)
    cluster.workers[0].stop()

    job_id = cluster.submit("in.jsonl", "out", regroup="always", shard_rows=25)
    for point in points:
        doomed = cluster.start_worker(crash_at=point)
        assert doomed.wait(60.0) == 137, doomed.log_text()[-2000:]
    cluster.start_worker()
    cluster.wait_done(job_id)
    assert all(shard["source_index"] < 0 for shard in cluster.shards(job_id))
    report = cluster.check(job_id, expected)
    assert report.is_whole, str(report)
    assert comparable(cluster.place("out"), cluster.s3) == comparable(cluster.place("plain"), cluster.s3)
