"""The broker's settings, and notifications: sent, lost without harm, never waited for."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from examples.cluster.servers import RedisServer
from gristmill.jobs.broker import (
    CONTROL_QUEUE,
    NOTIFY_TIMEOUT_S,
    PLAIN_QUEUE,
    PLAN_JOB,
    Notifier,
    bind_plain_clients,
    broker_url,
    build_celery,
    count_waiting,
    has_broker,
    model_queue,
    notify,
)
from gristmill.jobs.errors import RefusedError

NOBODY = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def notifier(redis_url: str) -> Iterator[Notifier]:
    opened = Notifier(redis_url)
    yield opened
    opened.close()


def keys(server: RedisServer, url: str) -> set[bytes]:
    with server.client(int(url.rpartition("/")[2])) as client:
        return set(client.keys("*"))


def test_the_flag_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_broker(None)
    monkeypatch.setenv("GRISTMILL_BROKER_URL", "redis://b/1")
    assert broker_url(None) == "redis://b/1"
    assert broker_url("rediss://a/0") == "rediss://a/0"
    assert has_broker(None)


def test_no_broker_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedError, match="GRISTMILL_BROKER_URL"):
        broker_url(None)


def test_a_broker_that_is_not_redis_is_refused_without_its_password() -> None:
    with pytest.raises(RefusedError, match="redis://HOST") as refused:
        broker_url("amqp://me:secret@host/")
    assert "secret" not in str(refused.value)


def test_the_settings_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://of-another-application/0")
    app = build_celery("redis://ours/0")
    assert (
        app.connection_for_read().as_uri() == app.connection_for_write().as_uri() == "redis://:**@ours:6379/0"
    )
    conf = app.conf
    assert conf.task_ignore_result and not conf.task_acks_late and not conf.task_reject_on_worker_lost
    assert (conf.worker_prefetch_multiplier, conf.worker_disable_prefetch) == (1, True)
    assert not conf.worker_cancel_long_running_tasks_on_connection_loss
    assert (conf.broker_connection_retry_on_startup, conf.broker_connection_max_retries) == (True, None)
    assert conf.accept_content == ["json"]
    assert conf.broker_transport_options == {
        "visibility_timeout": 86_400,
        "socket_timeout": 15.0,
        "socket_connect_timeout": 5.0,
        "socket_keepalive": True,
        "health_check_interval": 10,
        "priority_steps": [0, 3, 6, 9],
        "queue_order_strategy": "priority",
    }


def test_a_notify_is_one_message_without_any_binding(
    notifier: Notifier, redis_url: str, redis_server: RedisServer
) -> None:
    assert notifier.notify(PLAN_JOB, ["job_a"], CONTROL_QUEUE)
    assert notifier.notify(PLAN_JOB, ["job_b"], CONTROL_QUEUE, "high")
    assert notifier.notify(PLAN_JOB, ["job_c"], model_queue("m"), "low")
    separator = b"\x06\x16"
    expected = {b"gristmill" + separator + b"3", b"gristmill", b"gristmill.model.m" + separator + b"6"}
    assert keys(redis_server, redis_url) == expected


def test_a_broker_that_refuses_is_one_line_and_not_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not notify(build_celery(NOBODY, NOTIFY_TIMEOUT_S), PLAN_JOB, ["job_a"], CONTROL_QUEUE)
    (record,) = [record for record in caplog.records if record.name == "gristmill.jobs.broker"]
    assert "the broker does not answer" in record.getMessage()
    assert "secret" not in caplog.text


def test_a_broker_that_is_silent_costs_three_seconds_at_most() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        start_s = time.monotonic()
        assert not notify(build_celery(url, NOTIFY_TIMEOUT_S), PLAN_JOB, ["job_a"], CONTROL_QUEUE)
        assert time.monotonic() - start_s < 4.0


def test_a_notifier_is_silent_for_a_while_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    now, answers, calls = 100.0, False, []

    def fake_notify(*args: object) -> bool:
        calls.append(args)
        return answers

    monkeypatch.setattr("gristmill.jobs.broker.notify", fake_notify)
    notifier = Notifier(redis_url, pause_s=5.0, clock=lambda: now)
    assert not notifier.notify(PLAN_JOB, ["a"], CONTROL_QUEUE)
    assert not notifier.notify(PLAN_JOB, ["b"], CONTROL_QUEUE)
    assert len(calls) == 1
    now, answers = 105.0, True
    assert notifier.notify(PLAN_JOB, ["c"], CONTROL_QUEUE)
    notifier.close()


def test_what_waits_is_counted_over_all_priorities(notifier: Notifier, redis_url: str) -> None:
    celery = build_celery(redis_url, NOTIFY_TIMEOUT_S)
    assert count_waiting(celery) == 0
    notifier.notify(PLAN_JOB, ["job_a"], CONTROL_QUEUE, "high")
    notifier.notify(PLAN_JOB, ["job_b"], PLAIN_QUEUE, "low")
    assert count_waiting(celery) == 2


def test_plain_clients_are_bound_again_after_a_flush(redis_url: str, redis_server: RedisServer) -> None:
    celery = build_celery(redis_url, NOTIFY_TIMEOUT_S)
    with redis_server.client(int(redis_url.rpartition("/")[2])) as client:
        for _ in range(2):
            client.flushdb()
            bind_plain_clients(celery)
            assert {b"_kombu.binding.celery", b"_kombu.binding.gristmill"} <= set(client.keys("*"))


def test_many_hints_are_one_key(redis_url: str, redis_server: RedisServer, notifier: Notifier) -> None:
    for _ in range(100):
        notifier.notify(PLAN_JOB, ["job_a"], CONTROL_QUEUE)
    assert len(keys(redis_server, redis_url)) == 1
