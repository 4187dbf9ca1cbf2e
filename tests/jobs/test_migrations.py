"""The schema of either database: up, down and up again; equal to the models; refused when it is newer than we are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, create_engine, inspect, make_url, text

from examples.cluster.servers import PostgresServer
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.database import (
    SCHEMA_REVISION,
    Database,
    connect_database,
    migrate_database,
    run_migrations,
)
from gristmill.jobs.store.models import metadata
from gristmill.jobs.store.store import open_store
from tests.jobs.cases import ADD_WORKER, ELSEWHERE, at_once, claim_next, finish_shard, submit_job

TABLES = {"alembic_version", "attempts", "events", "jobs", "plan_pieces", "shards", "workers"}
VIEWS = {"job_progress", "row_errors_by_code", "shard_attempts", "worker_status"}
DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}
OLD_JOB = {
    "id": "job_old",
    "state": "completed",
    "identity": "i",
    "fingerprint": "f",
    "model": "null:",
    "output": "/out",
    "spec": "{}",
    "sources": "[]",
    "part_schema": b"",
    "num_rows": 3,
    "num_shards": 1,
    "created_at": 1.0,
    "active_s": 2.0,
    "finalize_fence": 0,
}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, once of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    empty: str = request.getfixturevalue("postgres_url")
    return empty


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    opened = connect_database(url)
    yield opened
    opened.dispose()


def names(connection: Connection) -> tuple[set[str], set[str]]:
    schema = inspect(connection)
    return set(schema.get_table_names()), set(schema.get_view_names())


def test_the_schema_goes_down_and_up_again(engine: Engine) -> None:
    with engine.begin() as connection:
        assert names(connection) == (TABLES, VIEWS)
        run_migrations(connection, "0001")
        assert names(connection) == (TABLES - {"plan_pieces", "workers"}, set())
        run_migrations(connection, "base")
        assert names(connection) == ({"alembic_version"}, set())
        run_migrations(connection)
        assert names(connection) == (TABLES, VIEWS)
        run_migrations(connection)


def test_the_migrations_give_what_the_models_say(engine: Engine) -> None:
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_a_job_of_before_the_queue_is_kept_up_and_down(url: str) -> None:
    assert migrate_database(url, "0001") == "no tables -> 0001"
    engine = create_engine(make_url(url).set(drivername=DRIVERS[make_url(url).drivername]))
    with engine.begin() as connection:
        marks = ", ".join(f":{name}" for name in OLD_JOB)
        connection.execute(text(f"INSERT INTO jobs ({', '.join(OLD_JOB)}) VALUES ({marks})"), OLD_JOB)
    assert migrate_database(url) == f"0001 -> {SCHEMA_REVISION}"
    with open_store(url) as store:
        job = store.jobs.load("job_old")
        assert (job.runner, job.priority, job.columns, job.dtype) == ("local", "normal", (), "auto")
        assert store.jobs.status("job_old").elapsed_s == 2
    assert migrate_database(url, "0001") == f"{SCHEMA_REVISION} -> 0001"
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT num_rows FROM jobs WHERE id = 'job_old'")) == 3
    engine.dispose()


def test_a_job_that_the_former_version_left_half_done_goes_on(url: str, tmp_path: Path) -> None:
    with open_store(url) as store:
        job = submit_job(store, tmp_path / "out", 10, 10)
        finish_shard(store, open_storage(job.output), claim_next(store))
        paused = claim_next(store)
    assert migrate_database(url, "0002") == f"{SCHEMA_REVISION} -> 0002"
    with open_store(url) as store:
        assert store.shards.heartbeat([paused], {}).lost_shard_ids == frozenset()
        finish_shard(store, open_storage(job.output), paused)
        assert finalize_job(store, open_storage(job.output), job.job_id, ELSEWHERE) == JobState.COMPLETED
        status = store.jobs.status(job.job_id)
        assert (status.rows_done, status.shards, status.eta_s) == (20, {"done": 2}, 0.0)


def test_rights_on_the_views_outlast_a_migration(
    migrated_postgres_url: str, postgres_server: PostgresServer
) -> None:
    postgres_server.execute("CREATE ROLE reader LOGIN")
    with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
        connection.execute("GRANT SELECT ON job_progress TO reader")
        migrate_database(migrated_postgres_url, "0002")
        migrate_database(migrated_postgres_url)
        connection.execute("SET ROLE reader")
        assert connection.execute("SELECT job_id FROM job_progress").fetchall() == []


def test_migrating_says_what_it_did(url: str) -> None:
    assert migrate_database(url) == f"no tables -> {SCHEMA_REVISION}"
    assert migrate_database(url) == f"{SCHEMA_REVISION} -> {SCHEMA_REVISION}"
    assert migrate_database(url, "base") == f"{SCHEMA_REVISION} -> no tables"


def test_a_revision_that_does_not_exist_is_refused(url: str) -> None:
    with pytest.raises(
        RefusedError, match="no schema revision 0099: give one of 0001, 0002, 0003, head, base"
    ):
        migrate_database(url, "0099")


def test_a_newer_schema_is_refused(engine: Engine, url: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for attempt in (connect_database, migrate_database):
        with pytest.raises(RefusedError, match="schema 9999.*upgrade gristmill"):
            attempt(url)


def test_threads_that_open_a_new_database_at_once_migrate_it_once(url: str) -> None:
    at_once(8, lambda _: connect_database(url).dispose())
    assert migrate_database(url) == f"{SCHEMA_REVISION} -> {SCHEMA_REVISION}"


def test_a_reading_transaction_sees_one_moment(engine: Engine) -> None:
    count = text("SELECT count(*) FROM workers")
    with Database(engine).read() as (reader, _):
        assert reader.scalar(count) == 0
        with Database(engine).write() as (writer, _):
            writer.execute(ADD_WORKER)
        assert reader.scalar(count) == 0
    with Database(engine).read() as (reader, _):
        assert reader.scalar(count) == 1
