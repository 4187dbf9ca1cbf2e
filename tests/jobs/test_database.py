"""Connections: where the database is, what is refused, and which faults mean `try again`. The schema is elsewhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

import gristmill.jobs.store.database
from examples.cluster.server_process import free_ports
from examples.cluster.servers import PostgresServer, running
from gristmill.jobs.errors import OutputError, RefusedError, StoreError, StoreUnavailable
from gristmill.jobs.store.database import Database, connect_database, database_url, safe_url
from tests.jobs.cases import ADD_WORKER
from tests.tcp_proxy import TcpProxy, proxy_before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "jobs.db"


@pytest.fixture
def sqlite_engine(path: Path) -> Iterator[Engine]:
    opened = connect_database(f"sqlite:///{path}")
    yield opened
    opened.dispose()


@pytest.fixture
def postgres_engine(migrated_postgres_url: str) -> Iterator[Engine]:
    opened = connect_database(migrated_postgres_url)
    yield opened
    opened.dispose()


@pytest.mark.parametrize(
    ("file", "match"), [("file", "not a database.*--database-url"), ("file/jobs.db", "--database-url")]
)
def test_a_place_that_holds_no_database_is_refused(tmp_path: Path, file: str, match: str) -> None:
    (tmp_path / "file").write_text("this is a letter, not a database" * 100)
    with pytest.raises(RefusedError, match=match):
        connect_database(f"sqlite:///{tmp_path / file}")


@pytest.mark.parametrize("url", ["nonsense", "oracle9://x/y", "mysql://host/db", ""])
def test_a_url_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(RefusedError, match="database.*postgresql://"):
        connect_database(url)


def test_the_file_is_in_a_new_folder_and_in_wal_mode(sqlite_engine: Engine, path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_url_comes_from_the_flag_then_the_environment_then_the_state_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert database_url(None) == f"sqlite:///{tmp_path}/gristmill/gristmill.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert database_url(None) == f"sqlite:///{tmp_path}/.local/state/gristmill/gristmill.db"
    monkeypatch.setenv("GRISTMILL_DATABASE_URL", "sqlite:///env.db")
    assert database_url(None) == "sqlite:///env.db"
    assert database_url("sqlite:///flag.db") == "sqlite:///flag.db"


def test_no_password_is_ever_shown() -> None:
    url = "postgresql://ann:s3cret@host/db?password=s3cret2&sslmode=require"
    assert "s3cret" not in safe_url(url)
    assert "host" in safe_url(url) and "sslmode" in safe_url(url)
    port = free_ports(1)[0]
    for wrong in ("nodialect://ann:s3cret@host/db", f"postgresql://ann:s3cret@127.0.0.1:{port}/db"):
        with pytest.raises((RefusedError, StoreUnavailable)) as caught:
            connect_database(wrong)
        assert "s3cret" not in str(caught.value)


def test_a_full_disk_under_the_file_says_so(sqlite_engine: Engine) -> None:
    with pytest.raises(OutputError, match="disk full.*run the same command again"):
        with Database(sqlite_engine).write() as (connection, _):
            connection.exec_driver_sql("PRAGMA max_page_count = 1")
            connection.exec_driver_sql("CREATE TABLE big AS SELECT zeroblob(10000000)")


def test_a_file_that_stays_locked_means_try_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gristmill.jobs.store.database, "BUSY_TIMEOUT_S", 0.05)
    engine = connect_database(f"sqlite:///{path}")
    with Database(engine).write(), pytest.raises(StoreUnavailable, match="does not answer now.*locked"):
        with Database(engine).write():
            pass
    engine.dispose()


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_postgresql_means_psycopg_3(scheme: str, migrated_postgres_url: str) -> None:
    engine = connect_database(f"{scheme}://{migrated_postgres_url.partition('://')[2]}?connect_timeout=7")
    assert engine.dialect.driver == "psycopg"
    engine.dispose()


def test_the_time_is_that_of_the_server(postgres_engine: Engine) -> None:
    with Database(postgres_engine).read() as (connection, before):
        assert connection.scalar(text("SELECT pg_sleep(0.01)")) is not None
    with Database(postgres_engine).read() as (_, after):
        assert 0.01 <= after - before < 5
    with Database(postgres_engine, lambda: 12.0).read() as (_, now):
        assert now == 12


def test_a_server_that_does_not_run_means_try_again() -> None:
    url = f"postgresql://ann@127.0.0.1:{free_ports(1)[0]}/jobs"
    with pytest.raises(StoreUnavailable, match="postgresql://ann@.*does not answer now"):
        connect_database(url)


def test_a_database_that_does_not_exist_is_refused(postgres_server: PostgresServer) -> None:
    with pytest.raises(RefusedError, match="does not exist.*--database-url"):
        connect_database(postgres_server.url("no_such_database"))


@pytest.mark.parametrize("before_commit", [False, True])
def test_a_connection_cut_in_a_transaction_means_try_again_and_the_next_one_works(
    postgres_engine: Engine, postgres_server: PostgresServer, before_commit: bool
) -> None:
    with pytest.raises(StoreUnavailable, match="does not answer now"):
        with Database(postgres_engine).write() as (connection, _):
            pid = connection.scalar(text("SELECT pg_backend_pid()"))
            postgres_server.execute(f"SELECT pg_terminate_backend({pid}, 5000)")
            if not before_commit:
                connection.execute(text("SELECT 1"))
    with Database(postgres_engine).write() as (connection, _):
        assert connection.scalar(text("SELECT 1")) == 1


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[TcpProxy]:
    with proxy_before(postgres_server.port) as before:
        yield before


@pytest.fixture
def engine_behind_proxy(
    postgres_server: PostgresServer, migrated_postgres_url: str, proxy: TcpProxy
) -> Iterator[Engine]:
    name = migrated_postgres_url.rpartition("/")[2]
    opened = connect_database(postgres_server.url(name, port=proxy.port))
    yield opened
    opened.dispose()


def test_a_network_that_fails_means_try_again_until_it_is_back(
    engine_behind_proxy: Engine, proxy: TcpProxy
) -> None:
    with pytest.raises(StoreUnavailable, match="does not answer now"):
        with Database(engine_behind_proxy).write() as (connection, _):
            connection.execute(text("SELECT 1"))
            proxy.refuse()
            proxy.cut()
    with pytest.raises(StoreUnavailable, match="does not answer now"):
        with Database(engine_behind_proxy).read():
            pass
    proxy.resume()
    with Database(engine_behind_proxy).read() as (connection, _):
        assert connection.scalar(text("SELECT 1")) == 1


def test_a_commit_whose_reply_is_lost_may_have_happened(engine_behind_proxy: Engine, proxy: TcpProxy) -> None:
    """So a caller reads the row back before it writes again."""
    with pytest.raises(StoreUnavailable, match="does not answer now"):
        with Database(engine_behind_proxy).write() as (connection, _):
            connection.execute(ADD_WORKER)
            proxy.loses_reply_to = lambda chunk: b"COMMIT" in chunk
    assert proxy.num_lost_replies == 1
    proxy.loses_reply_to = lambda chunk: False
    with Database(engine_behind_proxy).read() as (connection, _):
        assert connection.scalar(text("SELECT count(*) FROM workers")) == 1


def test_the_engine_outlives_a_restart_of_the_server() -> None:
    with running(PostgresServer) as server:
        engine = connect_database(server.url())
        server.stop()
        with pytest.raises(StoreUnavailable, match="does not answer now"):
            with Database(engine).read() as (connection, _):
                connection.execute(text("SELECT 1"))
        server.start()
        with Database(engine).read() as (connection, _):
            assert connection.scalar(text("SELECT count(*) FROM jobs")) == 0
        engine.dispose()


def test_a_lock_that_is_not_given_in_time_means_try_again(postgres_engine: Engine) -> None:
    lock = text("SELECT pg_advisory_xact_lock(:number)")
    with pytest.raises(StoreUnavailable, match="lock timeout"):
        with (
            Database(postgres_engine).write() as (first, _),
            Database(postgres_engine).write() as (second, _),
        ):
            first.execute(lock, {"number": 1})
            second.execute(text("SET LOCAL lock_timeout = '50ms'"))
            second.execute(lock, {"number": 1})


def test_a_transaction_that_stands_still_is_ended_by_the_server(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was paused between two statements holds its row locks for a limited time only."""
    monkeypatch.setattr(gristmill.jobs.store.database, "IDLE_IN_TRANSACTION_S", 1)
    engine = connect_database(migrated_postgres_url)
    with pytest.raises(StoreUnavailable, match="idle-in-transaction|does not answer now"):
        with Database(engine).write() as (paused, _):
            paused.execute(text("SELECT pg_advisory_xact_lock(7)"))
            with Database(engine).write() as (other, _):
                other.execute(text("SELECT pg_advisory_xact_lock(7)"))
            paused.execute(text("SELECT 1"))
    engine.dispose()


@pytest.mark.parametrize("statement", ["SELECT * FROM nowhere", "SELECT 1/0"])
def test_a_statement_that_can_never_work_is_no_reason_to_try_again(
    postgres_engine: Engine, statement: str
) -> None:
    with pytest.raises(StoreError) as caught, Database(postgres_engine).write() as (connection, _):
        connection.execute(text(statement))
    assert not isinstance(caught.value, StoreUnavailable)
    assert "\n" not in str(caught.value)


def test_a_reading_transaction_cannot_write(postgres_engine: Engine) -> None:
    with pytest.raises(StoreError, match="read-only"):
        with Database(postgres_engine).read() as (connection, _):
            connection.execute(text("DELETE FROM workers"))
    with Database(postgres_engine).write() as (connection, _):
        connection.execute(text("DELETE FROM workers"))
