"""The schema: up, down and up again; equal to the models; refused when it is newer than we are."""

from __future__ import annotations

import importlib.util
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect

from jobs.database import (
    SCHEMA_REVISION,
    connect_database,
    database_url,
    run_migrations,
    safe_url,
    write_transaction,
)
from jobs.errors import OutputError, RefusedError
from jobs.models import metadata

TABLES = {"alembic_version", "attempts", "events", "jobs", "shards"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "er" / "jobs.db"


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    opened = connect_database(f"sqlite:///{path}")
    yield opened
    opened.dispose()


def test_opening_a_database_creates_its_folder_and_its_tables(engine: Engine, path: Path) -> None:
    assert path.exists()
    assert set(inspect(engine).get_table_names()) == TABLES


def test_the_schema_goes_down_and_up_again(engine: Engine) -> None:
    with engine.begin() as connection:
        run_migrations(connection, "base")
        assert set(inspect(connection).get_table_names()) == {"alembic_version"}
        run_migrations(connection)
        assert set(inspect(connection).get_table_names()) == TABLES
        run_migrations(connection)


def test_the_migrations_give_what_the_models_say(engine: Engine) -> None:
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_the_newest_revision_is_the_one_that_the_code_expects() -> None:
    spec = importlib.util.find_spec("migrations")
    assert spec is not None and spec.origin is not None
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent))
    assert ScriptDirectory.from_config(config).get_heads() == [SCHEMA_REVISION]


def test_a_newer_schema_is_refused(engine: Engine, path: Path) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(RefusedError, match="schema 9999.*upgrade gristmill"):
        connect_database(f"sqlite:///{path}")


def test_threads_that_open_a_new_database_at_once_migrate_it_once(path: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            connect_database(f"sqlite:///{path}").dispose()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("this is a letter, not a database" * 100)
    with pytest.raises(RefusedError, match="not a database.*--database-url"):
        connect_database(f"sqlite:///{path}")


def test_a_database_in_an_impossible_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="--database-url"):
        connect_database(f"sqlite:///{tmp_path}/file/jobs.db")


@pytest.mark.parametrize("url", ["nonsense", "oracle9://x/y", ""])
def test_an_unreadable_url_is_refused(url: str) -> None:
    with pytest.raises(RefusedError, match="database"):
        connect_database(url)


def test_the_database_is_in_wal_mode(engine: Engine, path: Path) -> None:
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
    with pytest.raises(RefusedError) as caught:
        connect_database("nodialect://ann:s3cret@host/db")
    assert "s3cret" not in str(caught.value)


def test_a_full_disk_under_the_database_says_so(engine: Engine) -> None:
    with pytest.raises(OutputError, match="disk full.*run the same command again"):
        with write_transaction(engine) as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 1")
            connection.exec_driver_sql("CREATE TABLE big AS SELECT zeroblob(10000000)")
