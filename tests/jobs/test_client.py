"""The Python client: a job goes in by the database, the broker is only notified, and results come out as a dataset."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from examples.cluster.servers import RedisServer
from gristmill.jobs import client
from gristmill.jobs.broker import CONTROL_QUEUE, PLAN_JOB
from gristmill.jobs.errors import RefusedError, StoreUnavailable
from gristmill.jobs.records import JobStatus
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import claim_or_fail, commit_rows, create_job, run_all

NOBODY = "redis://:hush@127.0.0.1:1/0"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/client.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


def order(tmp_path: Path) -> dict[str, Any]:
    return {
        "input": [str(tmp_path / "in.jsonl")],
        "output": str(tmp_path / "out"),
        "model": "m",
        "prompt": "a",
    }


def test_a_submission_is_a_job_in_the_database(url: str, store: Store, tmp_path: Path) -> None:
    job_id = client.submit(**order(tmp_path), priority="high", idempotency_key="k", database_url=url)
    job = store.jobs.load(job_id)
    assert (job.state, job.runner, job.priority) == (JobState.VALIDATING, "workers", "high")
    assert client.submit(**order(tmp_path), idempotency_key="k", database_url=url) == job_id
    assert client.status(job_id, database_url=url).state == "validating"


def test_the_workers_are_notified_once(
    url: str, store: Store, tmp_path: Path, redis_url: str, redis_server: RedisServer
) -> None:
    words = order(tmp_path) | {"idempotency_key": "k", "priority": "high"}
    job_id = client.submit(**words, database_url=url, broker_url=redis_url)
    client.submit(**words, database_url=url, broker_url=redis_url)
    with redis_server.client(int(redis_url.rpartition("/")[2])) as redis:
        (message,) = redis.lrange(CONTROL_QUEUE, 0, -1)
    headers = json.loads(message)["headers"]
    assert (headers["task"], headers["argsrepr"]) == (PLAN_JOB, f"['{job_id}']")


def test_a_broker_that_is_down_is_a_warning(
    url: str, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = client.submit(**order(tmp_path), database_url=url, broker_url=NOBODY)
    assert store.jobs.load(job_id).state is JobState.VALIDATING
    assert "the broker does not answer" in caplog.text
    assert "hush" not in caplog.text


def test_what_is_wrong_is_refused_before_anything_is_written(url: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="promt is not an option"):
        client.submit(**order(tmp_path), promt="a", database_url=url)  # type: ignore[call-arg]
    with pytest.raises(RefusedError, match="redis://HOST"):
        client.submit(**order(tmp_path), database_url=url, broker_url="amqp://host")
    assert store.jobs.newest() == []
    with pytest.raises(RefusedError, match="gristmill list"):
        client.status("job_nowhere", database_url=url)


def test_local_places_become_absolute_and_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = JobSpec(input=["a*.jsonl", "folder/", "s3://bucket/in/"], output="out", model="m")
    absolute = client.to_absolute(spec)
    assert absolute.input == [f"{tmp_path}/a*.jsonl", f"{tmp_path}/folder/", "s3://bucket/in/"]
    assert absolute.output == f"{tmp_path}/out"
    assert client.to_absolute(spec.model_copy(update={"output": "s3://b/o"})).output == "s3://b/o"


def test_cancel_ends_a_job_that_nobody_runs(url: str, store: Store, tmp_path: Path) -> None:
    job_id = client.submit(**order(tmp_path), database_url=url)
    assert client.cancel(job_id, database_url=url) is JobState.CANCELLED
    assert client.wait(job_id, database_url=url).state == "cancelled"


def test_wait_follows_the_job_to_its_end(url: str, store: Store, tmp_path: Path) -> None:
    job_id = client.submit(**order(tmp_path), database_url=url)
    seen: list[JobStatus] = []

    def look(status: JobStatus) -> None:
        seen.append(status)
        if len(seen) == 3:
            store.plans.refuse(job_id, "no such file")

    status = client.wait(job_id, poll_s=0.01, on_progress=look, database_url=url)
    assert (status.state, status.message) == ("failed", "no such file")
    assert [each.state for each in seen] == ["validating"] * 3 + ["failed"]


def test_wait_gives_up_after_its_time(url: str, store: Store, tmp_path: Path) -> None:
    job_id = client.submit(**order(tmp_path), database_url=url)
    with pytest.raises(TimeoutError, match=f"{job_id} is validating"):
        client.wait(job_id, timeout_s=0.02, poll_s=0.01, database_url=url)


def test_wait_outlasts_a_database_that_is_away(
    store: Store, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = client.submit(**order(tmp_path), database_url=url)
    client.cancel(job_id, database_url=url)
    failures = [StoreUnavailable("restarted")] * 3
    load = store.jobs.status

    def load_later(job: str) -> JobStatus:
        if failures:
            raise failures.pop()
        return load(job)

    monkeypatch.setattr(store.jobs, "status", load_later)
    assert client.wait_for_job(store, job_id, poll_s=0.0).state == "cancelled"
    assert caplog.text.count("waits for the database") == 1


def test_an_end_can_be_acknowledged(url: str, store: Store, tmp_path: Path) -> None:
    job_id = client.submit(**order(tmp_path), on_complete="my.task", database_url=url)
    client.cancel(job_id, database_url=url)
    assert [notice.task for notice in store.notices.due()] == ["my.task"]
    assert client.acknowledge(job_id, database_url=url)
    assert store.notices.due() == []


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
@pytest.mark.parametrize("place", ["local", "s3"])
def test_results_are_the_committed_rows(
    url: str, store: Store, tmp_path: Path, s3_root: str, place: str, output_format: str
) -> None:
    output = f"{s3_root}/out" if place == "s3" else f"{tmp_path}/out"
    storage: Storage = open_storage(output)
    job = create_job(store, output, 12, 8, output_format=output_format)  # type: ignore[arg-type]
    assert client.results(job.job_id, database_url=url).count_rows() == 0
    claim = claim_or_fail(store, job)
    commit_rows(store, storage, claim, 0, 1, publish=False, requeue=True, output_format=output_format)
    assert client.results(job.job_id, database_url=url).count_rows() == 2
    claims = [claim_or_fail(store, job), claim_or_fail(store, job)]
    commit_rows(store, storage, claims[0], *range(2, 12), complete=True, output_format=output_format)
    commit_rows(store, storage, claims[1], *range(12, 20), complete=True, output_format=output_format)
    dataset = client.results(job.job_id, database_url=url)
    table = dataset.to_table().sort_by("row_index")
    assert table.column("row_index").to_pylist() == list(range(20))
    errors = dataset.to_table(filter=pc.field("error_code") == "null_value")
    assert sorted(errors.column("row_index").to_pylist()) == [9, 19]


def test_a_program_that_looked_at_some_results_in_an_object_store_ends_well(
    url: str, store: Store, s3_root: str, repo_root: Path
) -> None:
    """Arrow may still read ahead when the interpreter ends."""
    output = f"{s3_root}/out"
    job = create_job(store, output, 5, 7)  # type: ignore[arg-type]
    run_all(store, open_storage(output), job)
    code = (
        "import sys, gristmill.jobs.client\n"
        "dataset = gristmill.jobs.client.results(sys.argv[1], database_url=sys.argv[2])\n"
        "print(dataset.count_rows(), len(dataset.head(3)))"
    )
    command = [sys.executable, "-c", code, job.job_id, url]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["12", "3"]), done.stderr


def test_the_client_imports_neither_torch_nor_celery_nor_the_worker(repo_root: Path) -> None:
    code = (
        "import sys, gristmill.jobs.client\n"
        "heavy = {'torch', 'celery', 'kombu', 'worker', 'engine', 'boto3'} & set(sys.modules)\n"
        "sys.exit(f'imported at start: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
