"""Celery in a thread: what plain clients send arrives, what can't be used leaves no trace, nothing hangs at the end."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import redis

from examples.cluster.servers import RedisServer, running
from gristmill.jobs.broker import (
    ACKNOWLEDGE,
    CONTROL_QUEUE,
    PLAN_JOB,
    PLAN_PIECE,
    RUN_SHARDS,
    SUBMIT,
    Notifier,
    model_queue,
)
from gristmill.worker.serve.celery_app import CeleryHost, DeafnessCheck, build_app
from tests.worker.queue_kit import NotingDesk, eventually, plain_client

pytestmark = pytest.mark.filterwarnings("ignore::celery.exceptions.CPendingDeprecationWarning")


@pytest.fixture
def handlers() -> NotingDesk:
    return NotingDesk()


@contextmanager
def consuming(url: str, handlers: NotingDesk) -> Iterator[CeleryHost]:
    host = CeleryHost(url, build_app(url, handlers, ["m"]))
    host.start()
    try:
        yield host
    finally:
        handlers.stop()
        host.stop()
        assert host.join(10.0)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis that a test may stop, pause and empty."""
    with running(RedisServer) as server:
        yield server


def test_a_submission_that_could_not_be_stored_goes_back_to_the_queue(
    handlers: NotingDesk, redis_url: str
) -> None:
    handlers.is_busy = True
    with consuming(redis_url, handlers):
        plain_client(redis_url).send_task(SUBMIT, kwargs={"model": "m"})
        assert eventually(lambda: handlers.calls)
    later = NotingDesk()
    with consuming(redis_url, later):
        assert eventually(lambda: later.calls == [("submit", {"model": "m"})])


def test_it_waits_for_a_broker_that_is_down_at_the_start_and_at_the_end(
    handlers: NotingDesk, own_redis: RedisServer
) -> None:
    own_redis.stop()
    with consuming(own_redis.url(), handlers) as host:
        assert not host.is_ready.wait(0.5)
        own_redis.start()
        assert host.is_ready.wait(20.0)
        own_redis.stop()  # and ends while it is down


def test_it_does_not_keep_the_worker_while_the_broker_hangs(
    handlers: NotingDesk, own_redis: RedisServer
) -> None:
    with consuming(own_redis.url(), handlers) as host:
        assert host.is_ready.wait(15.0)
        own_redis.pause()
        host.stop()
        start_s = time.monotonic()
        host.join(2.0)
        assert time.monotonic() - start_s < 3.0
        own_redis.unpause()


def test_submissions_arrive_after_restarts_and_a_flush(
    handlers: NotingDesk, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.worker.serve.celery_app.CHECK_S", 0.5)
    client = plain_client(own_redis.url())
    with consuming(own_redis.url(), handlers) as host:
        assert host.is_ready.wait(15.0)
        for _ in range(3):
            own_redis.stop()
            own_redis.start()
            time.sleep(0.3)
        client.send_task(SUBMIT, kwargs={"model": "after the restarts"})
        assert eventually(lambda: ("submit", {"model": "after the restarts"}) in handlers.calls, 30.0)
        with own_redis.client() as redis:
            redis.flushall()
            assert eventually(lambda: redis.exists("_kombu.binding.celery"))
        client.send_task(SUBMIT, kwargs={"model": "after the flush"})
        assert eventually(lambda: ("submit", {"model": "after the flush"}) in handlers.calls, 30.0)


def test_a_remote_shutdown_is_noticed(handlers: NotingDesk, redis_url: str) -> None:
    with consuming(redis_url, handlers) as host:
        assert host.is_ready.wait(15.0)
        plain_client(redis_url).control.shutdown(
            destination=[f"gristmill-{os.getpid()}@{os.uname().nodename}"]
        )
        assert eventually(lambda: host.was_shut_down)


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(0, 5, 0), (0, 5, 0)], [False, False]),  # nothing waits
        ([(3, 5, 0), (3, 6, 0)], [False, False]),  # one was taken meanwhile
        ([(3, 5, 1), (3, 5, 1)], [False, False]),  # it is at work
        ([(3, 5, 0), (0, 5, 0), (3, 5, 0)], [False, False, False]),  # others took them
        ([(3, 5, 0), (4, 5, 0), (4, 5, 0)], [False, True, False]),  # deaf; then time to start again
    ],
)
def test_deaf_is_who_takes_nothing_while_messages_wait(
    looks: list[tuple[int, int, int]], expected: list[bool]
) -> None:
    check = DeafnessCheck()
    assert [check.look(*look) for look in looks] == expected


class Consumer(NamedTuple):
    """For all tests that only send messages. Celery runs once in a process, so they are the last ones."""

    host: CeleryHost
    handlers: NotingDesk
    url: str
    redis: redis.Redis


@pytest.fixture(scope="module")
def _consumer(redis_server: RedisServer, _redis_databases: Iterator[int]) -> Iterator[Consumer]:
    database = next(_redis_databases)
    handlers, url = NotingDesk(), redis_server.url(database)
    with redis_server.client(database) as client, consuming(url, handlers) as host:
        assert host.is_ready.wait(15.0)
        yield Consumer(host, handlers, url, client)


@pytest.fixture
def consumer(_consumer: Consumer) -> Consumer:
    _consumer.handlers.calls.clear()
    return _consumer


@pytest.mark.parametrize("queue", [None, "celery", "gristmill"])
def test_a_plain_client_reaches_us_with_and_without_a_queue(consumer: Consumer, queue: str | None) -> None:
    plain_client(consumer.url).send_task(SUBMIT, kwargs={"model": "m"}, queue=queue)
    assert eventually(lambda: consumer.handlers.calls == [("submit", {"model": "m"})])


def test_every_task_reaches_its_method(consumer: Consumer) -> None:
    notifier = Notifier(consumer.url)
    notifier.notify(PLAN_JOB, ["job_a"], CONTROL_QUEUE)
    notifier.notify(PLAN_PIECE, ["job_a", 3], CONTROL_QUEUE)
    notifier.notify(RUN_SHARDS, ["m"], model_queue("m"))
    notifier.notify(ACKNOWLEDGE, ["job_a"], CONTROL_QUEUE)
    notifier.close()
    plain_client(consumer.url).send_task(SUBMIT, ["in.jsonl"])  # positional: refused by name
    expected = [
        ("acknowledge", "job_a"),
        ("plan_job", "job_a"),
        ("plan_piece", ("job_a", 3)),
        ("run_shards", "m"),
        ("submit", {"argument 0": None}),
    ]
    assert eventually(lambda: sorted(consumer.handlers.calls, key=str) == expected)


def test_what_cannot_be_used_is_discarded_without_its_content(
    consumer: Consumer, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"prompt": "a very private prompt"}
    with caplog.at_level(logging.WARNING):
        plain_client(consumer.url).send_task("gristmill.sumbit", kwargs=content)
        plain_client(consumer.url, task_serializer="pickle").send_task(SUBMIT, kwargs=content)
        plain_client(consumer.url).send_task(PLAN_JOB, kwargs=content)
        plain_client(consumer.url).send_task(SUBMIT, kwargs={"model": "m"})
        assert eventually(lambda: consumer.handlers.calls == [("submit", {"model": "m"})])
        assert eventually(lambda: "gristmill.sumbit" in caplog.text and "ContentDisallowed" in caplog.text)
    assert "private" not in "".join(record.getMessage() for record in caplog.records)
    assert eventually(lambda: not consumer.redis.exists("unacked", "gristmill", "celery"))


def test_a_message_that_is_no_message_does_not_stop_the_consumer(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.worker.serve.celery_app.RESTART_S", 0.1)
    consumer.redis.lpush("gristmill", b"{}")
    consumer.redis.lpush("celery", b"not even JSON")
    assert eventually(lambda: not consumer.redis.exists("gristmill", "celery"))
    plain_client(consumer.url).send_task(SUBMIT, kwargs={"model": "m"})
    assert eventually(lambda: consumer.handlers.calls == [("submit", {"model": "m"})])


def test_it_leaves_the_signals_alone(consumer: Consumer) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
