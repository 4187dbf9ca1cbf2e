"""The commands of the queue: each changes the database, prints one line, and notifies; none waits for a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.cluster.servers import RedisServer
from gristmill.jobs.broker import CONTROL_QUEUE
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import WorkerModel
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.database import database_url
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import claim_next as claim_one
from tests.jobs.cases import finish_shard, start_job
from tests.worker.conftest import Invoke
from tests.worker.queue_kit import eventually


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store(database_url(None)) as opened:
        yield opened


def submit_words(tmp_path: Path) -> list[str]:
    return ["submit", "tickets.jsonl", "--output", str(tmp_path / "out"), "--model", "null", "--prompt", "a"]


def waiting(server: RedisServer, url: str) -> int:
    with server.client(int(url.rpartition("/")[2])) as redis:
        return int(redis.llen(CONTROL_QUEUE)) + int(redis.llen(f"{CONTROL_QUEUE}\x06\x163"))


def test_submit_prints_the_id_and_notifies(
    invoke: Invoke, store: Store, tmp_path: Path, redis_url: str, redis_server: RedisServer
) -> None:
    words = (
        "--priority low --not-before 1h --deadline 2d --on-complete my.task@mine --max-tokens 7"
        f" --idempotency-key k --broker-url {redis_url}"
    )
    code, out, err = invoke(*submit_words(tmp_path), *words.split())
    assert (code, err) == (0, "")
    job = store.jobs.load(out.strip())
    assert (job.state, job.priority, job.on_complete, job.idempotency_key) == (
        JobState.VALIDATING,
        "low",
        "my.task@mine",
        "k",
    )
    assert job.spec["max_tokens"] == 7
    assert job.spec["input"] == [str(Path.cwd() / "tickets.jsonl")]
    assert job.not_before is not None and job.deadline_at is not None and job.not_before < job.deadline_at
    with redis_server.client(int(redis_url.rpartition("/")[2])) as redis:
        assert redis.llen(f"{CONTROL_QUEUE}\x06\x166") == 1
    again = invoke(*submit_words(tmp_path), *words.split())
    assert again == (0, out, "")


def test_submit_needs_no_broker(invoke: Invoke, store: Store, tmp_path: Path) -> None:
    code, out, err = invoke(*submit_words(tmp_path))
    assert (code, err) == (0, "")
    assert [job.job_id for job in store.jobs.newest()] == [out.strip()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--deadline soon", "deadline"),
        ("--priority urgent", "--priority"),
        ("--on-complete a@b@c", "on_complete"),
        ("--broker-url amqp://me:hush@host", "redis://HOST"),
        ("--messages text", "--messages"),
    ],
)
def test_a_wrong_submission_is_refused_before_anything_is_written(
    invoke: Invoke, store: Store, tmp_path: Path, words: str, said: str
) -> None:
    code, out, err = invoke(*submit_words(tmp_path), *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert "hush" not in err
    assert store.jobs.newest() == []


def begin_job(invoke: Invoke, store: Store, tmp_path: Path, *shard_rows: int) -> str:
    """A submitted job that is planned by hand; its id."""
    job_id = invoke(*submit_words(tmp_path))[1].strip()
    assert start_job(store, store.jobs.load(job_id), *shard_rows)
    return job_id


def finish_job(store: Store, tmp_path: Path, num_errors: int) -> None:
    storage = open_storage(str(tmp_path / "out"))
    finish_shard(store, storage, claim_one(store), num_errors)


def test_cancel_and_resume_of_a_submitted_job(invoke: Invoke, store: Store, tmp_path: Path) -> None:
    job_id = begin_job(invoke, store, tmp_path, 10)
    assert invoke("cancel", job_id) == (0, f"{job_id}: cancelled\n", "")
    code, out, err = invoke("status", job_id, "--json")
    assert (code, json.loads(out)["state"], json.loads(out)["runner"]) == (0, "cancelled", "workers")
    assert invoke("resume", str(tmp_path / "out")) == (0, f"{job_id}: in_progress\n", "")
    assert store.jobs.load(job_id).state is JobState.IN_PROGRESS


def test_a_job_that_was_never_planned_is_planned_by_its_resume(
    invoke: Invoke, store: Store, tmp_path: Path, redis_url: str, redis_server: RedisServer
) -> None:
    job_id = invoke(*submit_words(tmp_path))[1].strip()
    invoke("cancel", job_id)
    assert invoke("resume", job_id, "--broker-url", redis_url) == (0, f"{job_id}: validating\n", "")
    assert waiting(redis_server, redis_url) == 1


def test_retry_of_a_submitted_job_only_changes_the_database(
    invoke: Invoke, store: Store, tmp_path: Path
) -> None:
    job_id = begin_job(invoke, store, tmp_path, 10)
    code, _, err = invoke("retry", job_id)
    assert (code, err.count("\n")) == (2, 1)  # it is not over
    finish_job(store, tmp_path, num_errors=2)
    invoke("cancel", job_id)
    assert invoke("retry", job_id) == (0, f"{job_id}: 2 failed rows run again\n", "")
    assert store.jobs.load(job_id).state is JobState.IN_PROGRESS


def test_local_jobs_are_resumed_and_retried_here(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    output = str(tmp_path / "local")
    assert invoke("run", str(rows), "--output", output, "--model", "null:", "--prompt", "a")[0] == 0
    calls: list[tuple[str, bool]] = []

    def call(reference: str, database_url: str | None, display: Any, retry: bool = False) -> int:
        calls.append((reference, retry))
        return 0

    monkeypatch.setattr("gristmill.worker.local.run.resume_local", call)
    assert (invoke("resume", output)[0], invoke("retry", output)[0]) == (0, 0)
    assert calls == [(output, False), (output, True)]


@pytest.mark.parametrize("command", ["retry", "resume"])
def test_an_unknown_job_is_refused(invoke: Invoke, command: str) -> None:
    code, out, err = invoke(command, "job_nowhere")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "job_nowhere" in err


def test_workers_are_listed(invoke: Invoke, store: Store) -> None:
    assert invoke("workers", "--json") == (0, "[]\n", "")
    assert invoke("workers")[0] == 0
    store.workers.register("worker_1", current_owner(), [WorkerModel("m", "f" * 32, "float32", True)], "0.1")
    (found,) = json.loads(invoke("workers", "--json")[1])
    assert (found["worker_id"], found["models"][0]["name"]) == ("worker_1", "m")
    assert "worker_1" in invoke("workers")[1]


def test_migrate_says_from_where_to_where(invoke: Invoke, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    code, out, err = invoke("migrate", "--database-url", url)
    assert (code, err) == (0, "")
    newest = out.strip().rpartition(" ")[2]
    assert out == f"no tables -> {newest}\n"
    assert invoke("migrate", "--to", "0001", "--database-url", url)[1] == f"{newest} -> 0001\n"
    code, out, err = invoke("migrate", "--to", "9999", "--database-url", url)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_clean_forgets_old_jobs_and_asks_first(invoke: Invoke, store: Store, tmp_path: Path) -> None:
    job_id = begin_job(invoke, store, tmp_path, 10)
    invoke("cancel", job_id)
    code, _, err = invoke("clean", "--older-than", "30d")
    assert (code, "--yes" in err) == (2, True)
    for age in ("a month", "30", "-3d"):
        assert invoke("clean", "--older-than", age, "--yes")[0] == 2
    assert "0 jobs" in invoke("clean", "--older-than", "30d", "--yes")[1]
    code, out, _ = invoke("clean", "--older-than", "0s", "--yes")
    assert (code, out.startswith("1 jobs")) == (0, True)
    assert store.jobs.newest() == []


@contextmanager
def follow(repo_root: Path, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A waiting command, gone at the end of the block whatever happened there."""
    command = [sys.executable, "-m", "gristmill", *words, "--wait"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=repo_root, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_while_waiting_leaves_the_job_running(repo_root: Path, store: Store, tmp_path: Path) -> None:
    with follow(repo_root, submit_words(tmp_path)) as waiting_command:
        assert eventually(lambda: store.jobs.newest())
        assert waiting_command.stdout is not None
        job_id = waiting_command.stdout.readline().strip()
        os.kill(waiting_command.pid, signal.SIGINT)
        _, err = waiting_command.communicate(timeout=60)
    assert waiting_command.returncode == 130
    assert err == (
        f"gristmill: job {job_id} goes on without this command; gristmill status {job_id},"
        f" gristmill cancel {job_id}\n"
    )
    assert store.jobs.load(job_id).state is JobState.VALIDATING


def test_waiting_ends_with_the_job(repo_root: Path, store: Store, tmp_path: Path) -> None:
    with follow(repo_root, submit_words(tmp_path)) as waiting_command:
        assert eventually(lambda: store.jobs.newest())
        (job,) = store.jobs.newest()
        start_job(store, job, 10)
        finish_job(store, tmp_path, num_errors=0)
        store.ends.request_cancel(job.job_id)
        assert store.ends.finish_cancel(job.job_id)
        out, err = waiting_command.communicate(timeout=60)
    assert waiting_command.returncode == 1
    assert "10: 10 completed, 0 failed" in out
    assert f"job {job.job_id} is cancelled; 10 of 10 rows are done and kept" in err


def test_a_job_that_planning_refuses_ends_the_wait_as_a_refusal(
    repo_root: Path, store: Store, tmp_path: Path
) -> None:
    with follow(repo_root, submit_words(tmp_path)) as waiting_command:
        assert eventually(lambda: store.jobs.newest())
        (job,) = store.jobs.newest()
        store.plans.refuse(job.job_id, "tickets.jsonl matches no file")
        _, err = waiting_command.communicate(timeout=60)
    assert waiting_command.returncode == 2
    assert err == f"gristmill: job {job.job_id} was refused: tickets.jsonl matches no file\n"


@pytest.mark.parametrize(
    "words", [["status", "x"], ["list"], ["workers"], ["submit", "--help"], ["worker", "--help"]]
)
def test_commands_that_notify_nobody_import_no_celery(repo_root: Path, words: list[str]) -> None:
    code = (
        "import sys; from gristmill.worker.cli.main import run_cli; run_cli(sys.argv[1:]); "
        "sys.exit(bool({'celery', 'torch', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=repo_root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
