"""A worker's start and end: what it refuses, what it waits for, what a signal does. The pool is a stand-in."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from examples.cluster.servers import RedisServer, running
from gristmill.jobs.broker import SUBMIT
from gristmill.jobs.errors import RefusedError, StoreUnavailable
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.store import open_store
from gristmill.worker.cli.main import run_cli
from gristmill.worker.serve.serve import load_allow, load_seconds, wait_for
from tests.integration.worker_process import WorkerProcess
from tests.worker.queue_kit import eventually, plain_client

SECRET_URL = "redis://:hush-hush@127.0.0.1:1/0"


FAKE = (sys.executable, "-m", "tests.worker.fake_worker")
Start = Callable[..., WorkerProcess]


def stop(worker: WorkerProcess, number: int = signal.SIGTERM) -> tuple[int, float]:
    """The exit code after the signal, and how long that took."""
    start_s = time.monotonic()
    return worker.stop(number, 30.0), time.monotonic() - start_s


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[WorkerProcess] = []

    def begin(url: str, **environment: str) -> WorkerProcess:
        words = ("--model", "m=null:", "--allow-uri", str(tmp_path), "--broker-url", url)
        log = tmp_path / f"worker-{len(started)}.log"
        started.append(WorkerProcess(words, os.environ | environment, log, FAKE))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_hands_back_and_ends_the_worker(
    start: Start, redis_url: str, number: int, code: int
) -> None:
    worker = start(redis_url)
    worker.wait_until_says("takes messages from the broker")
    exit_code, took_s = stop(worker, number)
    text = worker.log_text()
    assert (exit_code, text.count("pool: stop 8.5"), text.count("pool: stopped")) == (code, 1, 1), text
    assert took_s < 6.0
    assert "Traceback" not in text


def test_a_second_signal_ends_it_at_once(start: Start, redis_url: str) -> None:
    worker = start(redis_url, FAKE_STOP_S="20")
    worker.wait_until_says("the worker is up")
    worker.process.send_signal(signal.SIGTERM)
    worker.wait_until_says("pool: stop")
    exit_code, took_s = stop(worker)
    assert exit_code == 130
    assert took_s < 2.0


def test_an_ill_host_ends_the_worker_with_its_reason(start: Start, redis_url: str) -> None:
    worker = start(redis_url, FAKE_FAILURE="the canary died twice: look at the GPU")
    assert worker.wait(30.0) == 1
    assert "gristmill: the canary died twice: look at the GPU\n" in worker.log_text()
    assert "pool: stopped" in worker.log_text()


def test_it_works_and_ends_without_a_broker(start: Start) -> None:
    worker = start(SECRET_URL)
    worker.wait_until_says("Connection refused")
    assert "pool: start" in worker.log_text()
    exit_code, took_s = stop(worker)
    assert exit_code == 0
    assert took_s < 6.0
    assert "hush" not in worker.log_text()


def test_a_broker_that_hangs_does_not_keep_it(start: Start) -> None:
    with running(RedisServer) as server:
        worker = start(server.url())
        worker.wait_until_says("takes messages from the broker")
        server.pause()
        exit_code, took_s = stop(worker)
        server.unpause()
    assert exit_code == 0, worker.log_text()
    assert took_s < 8.0


def test_a_submission_of_a_plain_client_becomes_a_job_and_its_prompt_no_log_line(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "private words"}\n')
    order = {"input": [str(tmp_path / "in.jsonl")], "model": "m", "prompt": "secretly {{ text }}"}
    worker = start(redis_url)
    client = plain_client(redis_url)
    client.send_task(SUBMIT, kwargs=order | {"output": str(tmp_path / "out"), "idempotency_key": "good"})
    client.send_task(
        SUBMIT, kwargs=order | {"output": str(tmp_path / "out2"), "promt": "x", "idempotency_key": "bad"}
    )
    client.send_task(SUBMIT, kwargs=order | {"output": "/elsewhere", "idempotency_key": "outside"})
    with open_store(database_url(None)) as store:

        def states() -> dict[str | None, str]:
            return {job.idempotency_key: job.state.value for job in store.jobs.newest()}

        assert eventually(
            lambda: states() == {"good": "in_progress", "bad": "failed", "outside": "failed"}
        ), (
            states(),
            worker.log_text(),
        )
        messages = {job.idempotency_key: job.message or "" for job in store.jobs.newest()}
    assert "promt is not an option" in messages["bad"]
    assert "/elsewhere" in messages["outside"]
    worker.wait_until_says("pool: wake m")
    assert "secretly" not in worker.log_text() and "private" not in worker.log_text()


WORDS = {"--model": "m=null:", "--allow-uri": "/data", "--broker-url": "redis://127.0.0.1:1/0"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"--broker-url": None}, "GRISTMILL_BROKER_URL"),
        ({"--broker-url": "amqp://me:hush@host"}, "redis://HOST"),
        ({"--allow-uri": None}, "GRISTMILL_ALLOW_URIS"),
        ({"--model": None}, "--model"),
        ({"--model": "m"}, "NAME=PATH"),
        ({"--model": "m=/nowhere.gguf"}, "/nowhere.gguf"),
        ({"--max-models": "0"}, "--max-models"),
        ({"--database-url": "nonsense"}, "database URL"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, str | None],
    said: str,
) -> None:
    monkeypatch.setattr("gristmill.worker.serve.serve.set_up_logging", lambda: None)
    words = [word for flag, value in (WORDS | change).items() if value is not None for word in (flag, value)]
    assert run_cli(["worker", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gristmill: ") and err.count("\n") == 1
    assert said in err
    assert "hush" not in err


def test_a_newer_schema_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gristmill.worker.serve.serve.set_up_logging", lambda: None)
    with open_store(database_url(None)):
        pass
    engine = sqlalchemy.create_engine(database_url(None))
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    words = [word for pair in WORDS.items() for word in pair]
    assert run_cli(["worker", *words]) == 2
    assert "9999" in capsys.readouterr().err


def test_the_allowed_places_come_from_the_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_ALLOW_URIS", "s3://bucket/a, /data/")
    assert load_allow(()) == ("s3://bucket/a", "/data")
    assert load_allow(("/other",)) == ("/other",)


def test_seconds_of_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_seconds("GRISTMILL_LEASE_S", 60.0) == 60.0
    monkeypatch.setenv("GRISTMILL_LEASE_S", "3")
    assert load_seconds("GRISTMILL_LEASE_S", 60.0) == 3.0
    monkeypatch.setenv("GRISTMILL_LEASE_S", "soon")
    with pytest.raises(RefusedError, match="GRISTMILL_LEASE_S is 'soon'"):
        load_seconds("GRISTMILL_LEASE_S", 60.0)


def test_a_database_that_does_not_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.worker.serve.serve.RETRY_S", 0.0)
    failures = [StoreUnavailable("the database does not answer")] * 3

    def open_it() -> str:
        if failures:
            raise failures.pop()
        return "open"

    assert wait_for(open_it) == "open"
