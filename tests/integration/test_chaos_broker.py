"""A broker that forgets, dies and loses what it hands to a dying worker: figures 4 and 5 of RELIABILITY.md."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from celery import Celery

from examples.cluster.servers import RedisServer, running
from tests.integration.chaos import LONG, SHORT
from tests.integration.cluster import Cluster
from tests.integration.devices import Devices
from tests.integration.worker_process import wait_until

MODEL = {"null": "null:?delay_ms=15"}
RECOVERY_S = 15.0
RESEND_S = 15.0  # of the README's recipe


@contextmanager
def own_broker(cluster: Cluster) -> Iterator[RedisServer]:
    """A Redis that the test may stop and empty; the cluster's workers use it."""
    with running(RedisServer) as redis:
        cluster.broker_url = redis.url()
        cluster.environment["GRISTMILL_BROKER_URL"] = redis.url()
        yield redis


def submit_safely(
    cluster: Cluster, key: str, send: Callable[[], object], resend_s: float = RESEND_S
) -> tuple[str, int]:
    """The README's recipe: send, look for the key in job_progress, send again; the job's id, and how often."""
    for num_sent in range(1, 5):
        send()
        deadline = time.monotonic() + resend_s
        while time.monotonic() < deadline:
            if found := cluster.query(
                "SELECT job_id FROM job_progress WHERE idempotency_key = :key", key=key
            ):
                return str(found[0]["job_id"]), num_sent
            time.sleep(0.2)
    raise AssertionError(f"{key} was sent 4 times and is not there\n{cluster.describe()}")


def start_workers(cluster: Cluster, num_workers: int = 2, env: Mapping[str, str] | None = None) -> None:
    cluster.start_workers(num_workers, MODEL, env=env)
    told = "takes messages from the broker"
    wait_until(lambda: all(told in w.log_text() for w in cluster.workers), 30.0, told, cluster.logs)


def forget_everything(cluster: Cluster, redis: RedisServer, num_queued: int) -> list[str]:
    """FLUSHALL while the messages of new jobs lie in the queue; their ids. Workers sleep, so that none is taken."""
    pause_between_transactions(cluster)
    queued = [cluster.submit("small.jsonl", f"small-{i}", shard_rows=10) for i in range(num_queued)]
    with redis.client() as client:
        # Up to one for each worker was handed out; the others wait.
        assert client.llen("gristmill\x06\x163") + client.llen("gristmill") >= 1, client.keys()
        client.flushall()
    for worker in cluster.workers:
        worker.unpause()
    return queued


def is_writable(cluster: Cluster) -> bool:
    """Whether nobody is in the middle of writing; PostgreSQL has no such moments."""
    if not cluster.database_url.startswith("sqlite:///"):
        return True
    with closing(sqlite3.connect(cluster.database_url.removeprefix("sqlite:///"), timeout=0.1)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


def pause_between_transactions(cluster: Cluster) -> None:
    """Stops every worker at a moment at which none of them keeps others from writing to the database."""

    def pause() -> bool:
        for worker in cluster.workers:
            worker.pause()
        if is_writable(cluster):
            return True
        for worker in cluster.workers:
            worker.unpause()
        return False

    wait_until(pause, 30.0, "all workers stop outside of transactions")


def check_done(cluster: Cluster, job_ids: list[str], since: float) -> float:
    """How long after `since` the last of these small jobs was over, in database time."""
    for job_id in job_ids:
        cluster.assert_whole(job_id, [(cluster.place("small.jsonl"), i) for i in range(20)])
    return max(cluster.job(job_id)["finished_at"] for job_id in job_ids) - since


def check_outage(cluster: Cluster, redis: RedisServer, down_s: float, job_id: str) -> None:
    """The broker is killed and comes back: jobs go on meanwhile, and then messages do."""
    redis.stop()
    down_at = time.time()
    meanwhile = cluster.submit("small.jsonl", "meanwhile", shard_rows=10)
    while (left_s := down_at + down_s - time.time()) > 0:
        time.sleep(min(left_s, 0.5))
    num_rows = cluster.progress(job_id)["rows_done"]
    assert cluster.job(meanwhile)["state"] != "validating", "a job without a message waits for the broker"
    redis.start()
    back_at = time.time()
    order = lambda: cluster.send_submission("after", "small.jsonl", "after", shard_rows=10)  # noqa: E731
    after, num_sent = submit_safely(cluster, "after", order)
    took_s = check_done(cluster, [meanwhile, after], back_at)
    cluster.wait_done(job_id)
    end_s = cluster.job(job_id)["finished_at"] - back_at
    print(
        f"figure 4: broker down {down_s:g} s; {num_rows} rows done by its return, the job over {end_s:+.1f} s after it;"
        f" one sent after it over in {took_s:.1f} s ({num_sent} messages; limit {RECOVERY_S:g} s)"
    )
    assert max(end_s, took_s) <= RECOVERY_S
    assert num_sent == 1, "the first message after the broker's return was lost"


def check_flush(cluster: Cluster, redis: RedisServer, num_queued: int = 4) -> None:
    queued = forget_everything(cluster, redis, num_queued)
    took_s = check_done(cluster, queued, since=time.time())
    print(
        f"figure 4: FLUSHALL with {num_queued} jobs queued: all over in {took_s:.1f} s (limit {RECOVERY_S:g} s)"
    )
    assert took_s <= RECOVERY_S


@SHORT
def test_a_broker_that_forgets_and_dies_delays_nothing(cluster: Cluster) -> None:
    with own_broker(cluster) as redis:
        expected = cluster.write_rows("in.jsonl", 1000)
        cluster.write_rows("small.jsonl", 20)
        start_workers(cluster)
        job_id = cluster.submit("in.jsonl", "out", shard_rows=50)
        cluster.wait_started(job_id)
        queued = forget_everything(cluster, redis, 4)
        flushed_at = time.time()
        check_outage(cluster, redis, 10.0, job_id)
        assert check_done(cluster, queued, flushed_at) <= RECOVERY_S
        cluster.assert_whole(job_id, expected)


@LONG
@pytest.mark.long
@pytest.mark.timeout(600)
def test_flushall_in_a_large_job_delays_nothing(cluster: Cluster) -> None:
    with own_broker(cluster) as redis, closing(Celery(broker=redis.url(), set_as_current=False)) as client:
        expected = cluster.write_rows("in.jsonl", 5000)
        cluster.write_rows("small.jsonl", 20)
        start_workers(cluster)

        def send(key: str) -> None:  # by a client that has declared its exchange before, and never again
            kwargs = {**cluster.order("small.jsonl", key, shard_rows=10), "idempotency_key": key}
            client.send_task("gristmill.submit", kwargs=kwargs, queue="gristmill", ignore_result=True)

        assert submit_safely(cluster, "before", lambda: send("before"))[1] == 1
        job_id = cluster.submit("in.jsonl", "out", shard_rows=50)
        cluster.wait_rows(job_id, 1000)
        check_flush(cluster, redis)
        after, num_sent = submit_safely(cluster, "after", lambda: send("after"))
        print(
            f"figure 4: a client that was there before FLUSHALL sent {num_sent} times until its job was there"
        )
        cluster.wait_done(after)
        cluster.assert_whole(job_id, expected)


@LONG
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_broker_that_is_away_for_a_minute_delays_nothing(cluster: Cluster) -> None:
    with own_broker(cluster) as redis:
        expected = cluster.write_rows("in.jsonl", 5000)
        cluster.write_rows("small.jsonl", 20)
        cluster.start_workers(2, {"null": "null:?delay_ms=25"})
        job_id = cluster.submit("in.jsonl", "out", shard_rows=50)
        cluster.wait_started(job_id)
        check_outage(cluster, redis, 60.0, job_id)
        cluster.assert_whole(job_id, expected)


def check_dying_workers(
    cluster: Cluster, redis: RedisServer, num_jobs: int, num_deaths: int, resend_s: float
) -> None:
    """Jobs are submitted while idle workers die with the messages that the broker has just handed to them."""
    expected = cluster.write_rows("in.jsonl", 20)
    # A stopped worker still waits for a message, however long this machine takes to send one.
    patient = {**Devices(cluster.folder).environment(), "TEST_BROKER_WAIT_S": "60"}
    start_workers(cluster, env=patient)

    def all_wait() -> bool:
        with redis.client() as client:
            return bool(client.info("clients")["blocked_clients"] == len(cluster.running_workers()))

    keys = [f"order-{i}" for i in range(num_jobs)]
    batch = num_jobs // num_deaths

    first_sends: set[str] = set()

    def submit(key: str) -> tuple[str, int]:
        def send() -> None:
            cluster.send_submission(key, "in.jsonl", key, shard_rows=10)
            first_sends.add(key)

        return submit_safely(cluster, key, send, resend_s)

    found: list[tuple[str, int]] = []
    for death in range(num_deaths):
        wait_until(all_wait, 30.0, "every worker waits for a message", cluster.logs)
        victim = cluster.running_workers()[0]
        victim.pause()  # idle, and its connection waits for a message: it gets one and never reads it
        with ThreadPoolExecutor(batch) as pool:
            sent = [pool.submit(submit, key) for key in keys[death * batch : (death + 1) * batch]]
            wait_until(lambda: len(first_sends) >= (death + 1) * batch, 30.0, "all are sent")  # noqa: B023
            victim.kill()
            if death + 1 < num_deaths:
                cluster.start_worker(MODEL, is_awaited=False)
            found += [each.result() for each in sent]
    for job_id, _ in found:
        cluster.assert_whole(job_id, expected)
    job_ids = [row["id"] for row in cluster.query("SELECT id FROM jobs")]
    num_again = sum(num_sent > 1 for _, num_sent in found)
    print(
        f"figure 5: {num_deaths} idle workers killed while {num_jobs} jobs were submitted: {len(job_ids)} jobs,"
        f" each once; {num_again} had to be sent again"
    )
    assert len(job_ids) == num_jobs and set(job_ids) == {job_id for job_id, _ in found}
    assert num_again >= num_deaths, "a message was not lost: its worker did not die with it"


@SHORT
def test_twenty_jobs_survive_a_worker_that_dies_with_their_messages(cluster: Cluster) -> None:
    with own_broker(cluster) as redis:
        check_dying_workers(cluster, redis, num_jobs=20, num_deaths=1, resend_s=4.0)


@LONG
@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_jobs_survive_five_workers_that_die_with_their_messages(cluster: Cluster) -> None:
    with own_broker(cluster) as redis:
        check_dying_workers(cluster, redis, num_jobs=20, num_deaths=5, resend_s=RESEND_S)
