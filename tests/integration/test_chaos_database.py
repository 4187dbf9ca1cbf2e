"""Figure 7: a PostgreSQL that is stopped, cut off or stalled, and whose replies to COMMIT get lost.

No job is marked failed, every row is there once, and no shard stays running when its lease is over.
"""

from __future__ import annotations

import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from time import monotonic

import psutil
import pytest

from examples.cluster.servers import PostgresServer, running
from tests.integration.chaos import LONG
from tests.integration.clean_run import (
    assert_as_clean,
    assert_survived,
    num_overdue,
    num_rows_redone,
    pass_time,
)
from tests.integration.cluster import Cluster
from tests.integration.conftest import build_cluster
from tests.integration.worker_process import wait_until
from tests.tcp_proxy import TcpProxy, proxy_before

SLOW = {"null": "null:?delay_ms=10"}
LEASE_S = 3.0
RECOVERY_S = LEASE_S + 10.0

# By what only such a transaction says, in its SQL; the first that is found.
KINDS = {
    "claim": rb"INSERT INTO attempts",
    "commit": rb"UPDATE shards SET [^\0]*part_attempt=",
    "publish": rb"UPDATE shards SET [^\0]*published_at=",
    "end": rb"UPDATE jobs SET [^\0]*finished_at=coalesce",
    "finalize": rb"UPDATE jobs SET [^\0]*finalize_lease_until=",
    "heartbeat": rb"UPDATE shards SET [^\0]*lease_until=",
}
_PATTERNS = {kind: re.compile(sql) for kind, sql in KINDS.items()}
_PREPARED = re.compile(rb"(_pg3_\d+)\0((?:SELECT|INSERT|UPDATE|DELETE)[^\0]*)\0")
_NAME = re.compile(rb"_pg3_\d+")


class CommitLosses:
    """Loses the replies to chosen COMMITs: the transaction counts, and its author never hears of it.

    For TcpProxy.loses_reply_to, which asks from one thread for each connection.

    Lost are the first of each kind, so that rare ones are met too, and `share` of the others.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        self.share = share
        self.seen: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._connection = threading.local()

    def __call__(self, chunk: bytes) -> bool:
        prepared = self._connection.__dict__.setdefault("prepared", {})
        prepared.update(_PREPARED.findall(chunk))
        said = self._connection.__dict__.get("said", b"") + chunk
        said += b"".join(prepared.get(name, b"") for name in _NAME.findall(chunk))
        is_end = b"COMMIT\0" in chunk or b"ROLLBACK\0" in chunk
        self._connection.said = b"" if is_end else said
        return b"COMMIT\0" in chunk and self._choose(said)

    def _choose(self, said: bytes) -> bool:
        kind = next((kind for kind, sql in _PATTERNS.items() if sql.search(said)), None)
        if kind is None:
            return False
        with self._lock:
            self.seen[kind] += 1
            is_chosen = self.seen[kind] == 1 or self._chance.random() < self.share
            self.lost[kind] += is_chosen
        return is_chosen


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """One to stop."""
    with running(PostgresServer) as server:
        yield server


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[TcpProxy]:
    """The workers' way to it."""
    with proxy_before(postgres.port) as opened:
        yield opened


@pytest.fixture
def shaky(
    request: pytest.FixtureRequest, postgres: PostgresServer, proxy: TcpProxy, redis_url: str
) -> Iterator[Cluster]:
    """A database behind the proxy, and local files; in the long tests S3."""
    is_s3 = request.node.get_closest_marker("long") is not None
    urls = {"database_url": postgres.url(port=proxy.port), "reader_url": postgres.url()}
    with closing(build_cluster(request, "s3" if is_s3 else "local", broker_url=redis_url, **urls)) as cluster:
        yield cluster


def num_committed(cluster: Cluster) -> int:
    return int(cluster.query("SELECT coalesce(sum(part_rows), 0) AS rows FROM shards")[0]["rows"])


@pytest.mark.parametrize(
    "is_large", [False, pytest.param(True, marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_lost_replies_to_commits_cost_nothing(shaky: Cluster, proxy: TcpProxy, is_large: bool) -> None:
    num_rows, shard_rows, share = (5000, 50, 0.1) if is_large else (300, 30, 0.02)
    expected = shaky.write_rows("in.jsonl", num_rows)
    shaky.start_workers(2, SLOW)
    proxy.loses_reply_to = losses = CommitLosses(share)
    job_id = shaky.submit("in.jsonl", "out", shard_rows=shard_rows)
    assert_survived(shaky, job_id, expected)
    assert losses.lost.keys() >= KINDS.keys() - (set() if is_large else {"heartbeat"}), losses.lost
    assert not is_large or proxy.num_lost_replies >= 30
    print(f"figure 7: replies to COMMIT lost {dict(losses.lost)} of {dict(losses.seen)}, ", end="")
    print(f"{num_rows_redone(shaky, job_id)} rows redone at most, 0 jobs failed")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_database_that_stops_stalls_and_is_cut_off_fails_no_job(
    shaky: Cluster, proxy: TcpProxy, postgres: PostgresServer
) -> None:
    expected = shaky.write_rows("in.jsonl", 5000)
    shaky.start_workers(2, SLOW)
    job_id = shaky.submit("in.jsonl", "out", shard_rows=50)
    shaky.wait_rows(job_id, 200)
    chance = random.Random(7)
    recoveries = []
    for number in range(8):
        pass_time(chance.uniform(0.0, 1.0))
        before = num_committed(shaky)
        if number == 3:
            proxy.stall()
            pass_time(LEASE_S + 2.0)  # nobody can keep a lease
            proxy.resume()
        elif number % 4 == 1:
            proxy.cut()
        else:
            postgres.stop()
            pass_time(chance.choice([0.0, 0.0, LEASE_S + 1.0]))
            postgres.start()
        start = monotonic()
        shaky.wait_rows(job_id, before + 1, RECOVERY_S)
        recoveries.append(monotonic() - start)
    assert_survived(shaky, job_id, expected)
    times = ", ".join(f"{recovery_s:.1f}" for recovery_s in recoveries)
    print(f"figure 7: 8 faults, seconds to the next committed rows: {times}; ", end="")
    print(f"{num_rows_redone(shaky, job_id)} rows redone at most, 0 jobs failed")


@pytest.mark.parametrize(
    "cluster",
    [("sqlite", "local"), pytest.param(("postgres", "s3"), marks=pytest.mark.long)],
    indirect=True,
    ids="-".join,
)
def test_sigterm_inside_a_commit_leaves_no_shard_running(cluster: Cluster) -> None:
    """As in Celery's issue 10271: the signal comes while the transaction waits to be committed."""
    expected = cluster.write_rows("in.jsonl", 300)
    first = cluster.start_worker(crash_at="commit.inside:2!stop")
    job_id = cluster.submit("in.jsonl", "out", shard_rows=30)
    process = psutil.Process(first.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 30.0, "it is inside a commit")
    first.process.send_signal(signal.SIGTERM)
    first.unpause()
    assert first.wait(20.0) == 0
    assert "running" not in {shard["state"] for shard in cluster.shards(job_id)}
    assert num_committed(cluster) >= 60
    cluster.start_worker()
    assert_as_clean(cluster, job_id, expected)
    assert "lost" not in {attempt["outcome"] for attempt in cluster.attempts(job_id)}


@pytest.mark.long
@pytest.mark.timeout(300)
@LONG
def test_no_shard_stays_running_after_twenty_sigterms(cluster: Cluster) -> None:
    expected = cluster.write_rows("in.jsonl", 5000)
    workers = cluster.start_workers(2, SLOW)
    job_id = cluster.submit("in.jsonl", "out", shard_rows=50)
    chance = random.Random(8)
    for number in range(20):
        cluster.wait_rows(job_id, min(200 * number + 50, 4900))
        pass_time(chance.uniform(0.0, 0.5))
        leaving = workers[number % 2]
        leaving.wait_until_up()
        workers[number % 2] = cluster.start_worker(SLOW, is_awaited=False)
        assert leaving.stop() == 0
        left = cluster.query(
            "SELECT id FROM shards WHERE state = 'running' AND owner LIKE :who", who=f"{leaving.pid}:%"
        )
        assert not left and not num_overdue(cluster, RECOVERY_S - LEASE_S)
    assert_as_clean(cluster, job_id, expected)
    outcomes = [attempt["outcome"] for attempt in cluster.attempts(job_id)]
    print(
        f"figure 7: 20 SIGTERM, {len(outcomes)} attempts, {outcomes.count('requeued')} handed back, ", end=""
    )
    print(f"{outcomes.count('lost')} lost, {num_rows_redone(cluster, job_id)} rows redone at most")
    assert outcomes.count("lost") == 0
