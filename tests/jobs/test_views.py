"""The views for people who write SQL: the same numbers as `gristmill status`, on either database."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import text, update

from examples.cluster.servers import PostgresServer
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import JobRecord, WorkerModel
from gristmill.jobs.stats import JobStats
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.models import PERCENTILE_COLUMNS, shards
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import (
    ELSEWHERE,
    Clock,
    change_job,
    claim_or_fail,
    commit_rows,
    create_job,
    run_all,
    submit_job,
)

SAME_NAMES = (
    *("job_id", "idempotency_key", "state", "message", "model", "runner", "priority", "output"),
    *("rows", "rows_done", "completed", "failed", "skipped", "not_run"),
    *("prompt_tokens", "completion_tokens", "cached_tokens"),
    *("tokens_per_s", "completion_tokens_per_s", "rows_per_s", "eta_s", "elapsed_s"),
)
IN_CONTAINER = Owner("mill-7/4026531836", "boot", 7, 7)


def read_view(store: Store, view: str, where: str = "") -> list[dict[str, Any]]:
    with store.database.read() as (connection, _):
        return [dict(row) for row in connection.execute(text(f"SELECT * FROM {view} {where}")).mappings()]


def check_same(store: Store, job: JobRecord) -> dict[str, Any]:
    """Compares the job's line in job_progress with its status, number by number; returns the line."""
    (line,) = read_view(store, "job_progress", f"WHERE job_id = '{job.job_id}'")
    status = store.jobs.status(job.job_id)
    assert {name: line[name] for name in SAME_NAMES} == {name: getattr(status, name) for name in SAME_NAMES}
    assert line["cached_share"] == status.saved_tokens_share
    states = ("queued", "running", "done", "failed", "cancelled")
    assert {state: line[f"shards_{state}"] for state in states} == dict.fromkeys(states, 0) | status.shards
    assert not [name for name, value in line.items() if type(value).__name__ == "Decimal"]
    return line


@pytest.mark.parametrize("runner", ["local", "workers"])
def test_the_progress_of_a_job_is_that_of_its_status_at_every_stage(
    store: Store, storage: Storage, clock: Clock, out: Path, runner: str
) -> None:
    job = create_job(store, out, 20, 10, priority="high")
    owner = None if runner == "workers" else ELSEWHERE.to_text()
    change_job(store, job, runner=runner, priority=0)
    assert check_same(store, job)["rows_per_s"] is None
    change_job(store, job, owner=owner, owner_seen_at=clock.now, active_s=8.0)
    claim = claim_or_fail(store, job)
    claim = commit_rows(store, storage, claim, *range(10))  # type: ignore[assignment]
    assert claim is not None
    line = check_same(store, job)
    assert (line["rows_done"], line["rows_per_s"], line["eta_s"]) == (10, 1.25, 16)
    assert (line["priority"], line["inputs"]) == ("high", 1)
    with store.database.write() as (connection, _):
        connection.execute(update(shards).where(shards.c.id == claim.shard_id).values(rows_reported=16))
    assert check_same(store, job)["rows_done"] == 16
    assert commit_rows(store, storage, claim, *range(10, 20), complete=True)
    run_all(store, storage, job)
    line = check_same(store, job)
    assert line["not_run"] == 0
    measured = store.jobs.status(job.job_id).percentiles
    assert {name: line[name] for name in PERCENTILE_COLUMNS} == {
        f"{measure}_{label}": value for measure, values in measured.items() for label, value in values.items()
    }
    assert line["queue_wait_s_p50"] is not None
    change_job(store, job, state="completed", finished_at=clock.now)
    assert check_same(store, job)["eta_s"] == 0
    change_job(store, job, state="failed", message="it broke", runner="workers")
    assert check_same(store, job)["eta_s"] is None


def test_a_job_of_a_process_that_works_now_counts_the_time_since_its_last_word(
    store_url: str, out: Path
) -> None:
    with open_store(store_url) as store:
        job = create_job(store, out, 4, owner=ELSEWHERE)
        change_job(store, job, active_s=10.0, owner_seen_at=time.time() - 20)
        for runner, owner in (("local", ELSEWHERE.to_text()), ("workers", None)):
            change_job(store, job, runner=runner, owner=owner)
            (line,) = read_view(store, "job_progress")
            assert line["elapsed_s"] == pytest.approx(30, abs=3)
            assert store.jobs.status(job.job_id).elapsed_s == pytest.approx(line["elapsed_s"], abs=3)
        change_job(store, job, owner_seen_at=time.time() - 5000)
        assert read_view(store, "job_progress")[0]["elapsed_s"] == 70
        assert store.jobs.status(job.job_id).elapsed_s == 70


def test_a_job_that_has_no_shards_yet_has_no_numbers(store: Store, out: Path) -> None:
    submit_job(store, out, key="key-1")
    (line,) = read_view(store, "job_progress", "WHERE idempotency_key = 'key-1'")
    assert (line["rows"], line["rows_done"], line["not_run"], line["shards_queued"]) == (0, 0, 0, 0)
    assert (line["eta_s"], line["cached_share"], line["elapsed_s"], line["inputs"]) == (None, None, 0, 0)


def test_times_are_in_the_words_of_the_database(store: Store, store_url: str, out: Path) -> None:
    job = create_job(store, out, 4)
    change_job(store, job, not_before=1_800_000_000.25, deadline_at=1_800_086_400.0)
    (line,) = read_view(store, "job_progress")
    if store_url.startswith("sqlite"):
        assert line["not_before"] == "2027-01-15T08:00:00.250Z"
        assert line["deadline_at"] == "2027-01-16T08:00:00.000Z"
    else:
        assert line["not_before"] == datetime(2027, 1, 15, 8, 0, 0, 250_000, UTC)
        assert line["deadline_at"] == datetime(2027, 1, 16, 8, tzinfo=UTC)
    assert line["finished_at"] is None


def test_attempts_name_the_worker_and_how_they_ended(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = create_job(store, out, 20)
    claim = claim_or_fail(store, job, IN_CONTAINER)
    commit_rows(store, storage, claim, *range(7))
    clock.now += 100
    claim_or_fail(store, job)
    first, second = read_view(store, "shard_attempts", "ORDER BY fence")
    assert (first["job_id"], first["shard_index"], first["fence"]) == (job.job_id, 0, 1)
    assert (first["worker"], first["outcome"], first["rows_committed"]) == ("7@mill-7", "lost", 7)
    assert (second["worker"], second["outcome"], second["ended_at"]) == ("7@elsewhere", "running", None)
    assert first["started_at"] < first["ended_at"]


def test_error_rows_are_counted_by_code_over_all_shards(store: Store, storage: Storage, out: Path) -> None:
    run_all(store, storage, create_job(store, out, 5))
    assert read_view(store, "row_errors_by_code") == [], "a job without errors has no line"
    job = create_job(store, out, 30, 30, 5)
    run_all(store, storage, job)
    with store.database.write() as (connection, _):
        stats = JobStats(errors_by_code={"too_long": 2, "null_value": 1}).to_json()
        connection.execute(update(shards).where(shards.c.shard_index == 1).values(stats=stats))
    lines = read_view(store, "row_errors_by_code", "ORDER BY error_code")
    assert [(line["job_id"], line["error_code"], line["rows"]) for line in lines] == [
        (job.job_id, "null_value", 4),
        (job.job_id, "too_long", 2),
    ]


def test_workers_are_busy_idle_stopped_or_lost(store: Store, clock: Clock) -> None:
    clock.now = time.time() - 90  # the view's time is the database's own
    loaded, other = WorkerModel("a", "f", "float32", True), WorkerModel("b", "e", "float32", False)
    for number in range(4):
        store.workers.register(f"w{number}", IN_CONTAINER, [loaded, other] if number else [], "1.2")
    clock.now += 80
    assert store.workers.beat("w1", [loaded, other], 2, 40)
    assert store.workers.beat("w0", [], 0, 0)
    assert not store.workers.beat("w9", [], 0, 0)
    store.workers.stop("w2", "the canary died")
    clock.now += 10
    lines = read_view(store, "worker_status", "ORDER BY worker_id")
    records = sorted(store.workers.load_all(), key=lambda worker: worker.worker_id)
    assert [line["state"] for line in lines] == ["idle", "busy", "stopped", "lost"]
    assert [worker.state for worker in records] == ["idle", "busy", "stopped", "lost"]
    assert [line["message"] for line in lines] == [worker.message for worker in records]
    assert (lines[0]["models"], lines[1]["models"], records[1].models) == (None, "a, b", (loaded, other))
    assert (lines[1]["host"], lines[1]["pid"], records[1].owner) == ("mill-7", 7, IN_CONTAINER)
    assert (lines[1]["shards"], lines[1]["rows_in_flight"]) == (2, 40)
    assert (records[1].num_shards, records[1].num_rows_in_flight, records[1].version) == (2, 40, "1.2")
    assert (lines[2]["message"], lines[3]["message"]) == ("the canary died", None)


def test_a_role_that_may_read_the_views_needs_no_other_right(
    migrated_postgres_url: str, postgres_server: PostgresServer, out: Path
) -> None:
    role = f"analyst_{uuid.uuid4().hex[:8]}"
    with open_store(migrated_postgres_url) as store:
        job = create_job(store, out, 4)
    postgres_server.execute(f"CREATE ROLE {role} LOGIN")
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        views = "job_progress, shard_attempts, row_errors_by_code, worker_status"
        connection.execute(f"GRANT SELECT ON {views} TO {role}")
    with psycopg.connect(migrated_postgres_url, user=role, autocommit=True) as connection:
        assert connection.execute("SELECT job_id FROM job_progress").fetchall() == [(job.job_id,)]
        for view in views.split(", "):
            connection.execute(f"SELECT * FROM {view}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT id FROM jobs")


def test_one_job_among_many_shards_is_read_by_its_index(store: Store, out: Path) -> None:
    job = create_job(store, out, 4)
    for number in range(20):
        create_job(store, out.with_name(f"out-{number}"), *[0] * 1000)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        assert len(read_view(store, "job_progress", f"WHERE job_id = '{job.job_id}'")) == 1
        best = min(best, time.perf_counter() - start)
    assert best < 0.01
