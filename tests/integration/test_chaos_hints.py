"""Messages that are doubled, reordered, stale, of nothing, or wrong: figure 6 of RELIABILITY.md."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import pytest
import redis
from celery import Celery

from tests.integration.chaos import LONG, SHORT, count_stale_commits
from tests.integration.cluster import Cluster
from tests.integration.worker_process import wait_until

MODEL = {"null": "null:?delay_ms=5"}
QUEUES = ("gristmill", "celery", "gristmill.model.null")
TIMES = 10

Hint = tuple[str, list[Any], dict[str, Any]]  # task, arguments, keywords


def build_hints(cluster: Cluster, job_ids: Iterable[str], order: dict[str, Any]) -> list[Hint]:
    """Every message there is: true ones of these jobs, of jobs and models that are not, and wrong ones."""
    hints: list[Hint] = [("gristmill.submit", [], order)]
    for job_id in job_ids:
        hints += [("gristmill.plan_job", [job_id], {}), ("gristmill.acknowledge", [job_id], {})]
        hints += [("gristmill.plan_piece", [job_id, index], {}) for index in (0, 1, 999)]
    hints += [("gristmill.run_shards", [model], {}) for model in ("null", "unknown", "", "../null")]
    for wrong in (
        [],
        [None],
        [["a", "b"], {"c": 1}, 3, 4],
        ["x" * 10_000],
        [-1, "x"],
        ["job_unknown", "no number"],
    ):
        names = ("plan_job", "plan_piece", "run_shards", "acknowledge")
        hints += [(f"gristmill.{name}", wrong, {}) for name in names]
    hints += [
        ("gristmill.plan_job", [], {"job_id": "job_unknown", "and": "more"}),
        ("gristmill.unknown", [], {}),
    ]
    return hints


def send_all(cluster: Cluster, hints: list[Hint], chance: random.Random) -> None:
    """Sends the hints over one connection, in a random order, to random queues, at random priorities."""
    chance.shuffle(hints)
    with closing(Celery(broker=cluster.broker_url, set_as_current=False)) as app:
        with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
            for task, args, kwargs in hints:
                where = {"queue": chance.choice(QUEUES), "priority": chance.choice((0, 3, 6, 9))}
                app.send_task(task, args, kwargs, producer=producer, ignore_result=True, **where)


def load_keys(client: redis.Redis) -> set[bytes]:
    return set(client.keys())


def check_hints(cluster: Cluster, num_rows: int, shard_rows: int, num_hints: int, num_workers: int) -> None:
    """A job runs, and earlier ones rest, while so many hints come in; afterwards Redis is as it was."""
    chance = random.Random(6)
    expected = cluster.write_rows("in.jsonl", num_rows)
    small = cluster.write_rows("small.jsonl", 20)
    cluster.start_workers(num_workers, MODEL)
    order = {**cluster.order("small.jsonl", "order", shard_rows=10), "idempotency_key": "order"}
    old_id = cluster.submit("small.jsonl", "old", shard_rows=10)
    cluster.wait_done(old_id)
    send_all(cluster, build_hints(cluster, [old_id], order), chance)
    ordered_id = cluster.wait_job("order")
    cluster.wait_done(ordered_id)
    with closing(redis.Redis.from_url(cluster.broker_url)) as client:
        queues = lambda: {key for key in load_keys(client) if not key.startswith(b"_kombu")}  # noqa: E731
        wait_until(lambda: not queues(), 60.0, "the queues are empty", cluster.describe)
        baseline = load_keys(client)
        job_id = cluster.submit("in.jsonl", "out", shard_rows=shard_rows)
        hints = build_hints(cluster, [old_id, ordered_id, job_id, "job_unknown"], order)
        num_times = max(TIMES, -(-num_hints // len(hints)))
        send_all(cluster, hints * num_times, chance)
        num_keys, since = len(load_keys(client)), time.monotonic()
        cluster.wait_done(job_id)
        wait_until(lambda: not queues(), 600.0, "the queues are empty", cluster.describe)
        drain_s = time.monotonic() - since
        assert load_keys(client) == baseline
    for done_id, name, rows in (
        (job_id, "out", expected),
        (ordered_id, "order", small),
        (old_id, "old", small),
    ):
        cluster.assert_whole(done_id, rows)
        assert count_stale_commits(cluster, done_id) == 0, name
        assert all(attempt["outcome"] == "done" for attempt in cluster.attempts(done_id)), name
    jobs = cluster.query("SELECT id, state FROM jobs")
    print(
        f"figure 6: {len(hints) * num_times} hints, each {num_times} times, in random order: {len(jobs)} jobs, each"
        f" shard committed once; Redis: {len(baseline)} keys before and after, {num_keys} with hints waiting,"
        f" which took {drain_s:.0f} s more"
    )
    assert {job["id"] for job in jobs} == {job_id, old_id, ordered_id}
    assert len(cluster.running_workers()) == num_workers


@SHORT
def test_doubled_stale_and_wrong_messages_change_nothing(cluster: Cluster) -> None:
    check_hints(cluster, num_rows=200, shard_rows=20, num_hints=0, num_workers=1)


@LONG
@pytest.mark.long
@pytest.mark.timeout(900)
def test_ten_thousand_messages_change_nothing_and_leave_no_key(cluster: Cluster) -> None:
    check_hints(cluster, num_rows=5000, shard_rows=50, num_hints=10_000, num_workers=2)
