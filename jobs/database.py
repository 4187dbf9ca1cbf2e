"""Connections to the job database, and its schema. Knows nothing of jobs or shards.

On SQLite every writing transaction is BEGIN IMMEDIATE: a deferred one that turns to writing fails with
"database is locked" as soon as two processes do it.
"""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError, SQLAlchemyError

from jobs.errors import OutputError, RefusedError, StoreError

SCHEMA_REVISION = "0001"  # the newest revision in migrations/versions
BUSY_TIMEOUT_S = 30.0
_READ_ONLY = "gristmill_read_only"


def database_url(flag: str | None) -> str:
    """The database to use: the flag, else GRISTMILL_DATABASE_URL, else one SQLite file per user."""
    given = flag or os.environ.get("GRISTMILL_DATABASE_URL")
    if given:
        return given
    state_folder = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return f"sqlite:///{Path(state_folder) / 'gristmill' / 'gristmill.db'}"


def safe_url(url: str) -> str:
    """The URL for people's eyes: without passwords, also those given as ?password=."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return "(an unreadable URL)"
    secrets = [name for name in parsed.query if "pass" in name.lower()]
    return parsed.difference_update_query(secrets).render_as_string(hide_password=True)


def connect_database(url: str) -> Engine:
    """An engine for `url`, its schema migrated to SCHEMA_REVISION. Raises RefusedError when that can't be."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise RefusedError(
            "the database URL can't be read: give one like sqlite:////home/me/jobs.db or postgresql://host/name"
        ) from None
    try:
        if parsed.get_backend_name() == "sqlite":
            engine = _connect_sqlite(parsed.database or ":memory:")
        else:
            engine = create_engine(parsed)
    except (OSError, ImportError, SQLAlchemyError) as error:
        raise _refusal(url, error) from error
    try:
        _migrate(engine, url)
    except (OSError, SQLAlchemyError) as error:
        engine.dispose()
        raise _refusal(url, error) from error
    except RefusedError:
        engine.dispose()
        raise
    return engine


@contextmanager
def write_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction that may change rows; database faults become StoreError or OutputError."""
    with _translated_errors(engine), engine.begin() as connection:
        yield connection


@contextmanager
def read_transaction(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads: on SQLite it waits for no writer."""
    with _translated_errors(engine), engine.connect() as connection:
        with connection.execution_options(**{_READ_ONLY: True}).begin():
            yield connection


def database_now(connection: Connection, clock: Callable[[], float] | None) -> float:
    """The database's time, one clock for all owners; `clock` replaces it in tests."""
    if clock is not None:
        return clock()
    if connection.dialect.name == "sqlite":
        return time.time()  # the file's host is this host
    return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))


def run_migrations(connection: Connection, target: str = "head") -> None:
    """Moves the schema to `target` (a revision, head or base) inside the connection's transaction."""
    from alembic import command
    from alembic.config import Config

    spec = importlib.util.find_spec("migrations")
    assert spec is not None and spec.origin is not None, "the package migrations is installed with jobs"
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    current = _revision(connection) or "base"
    if target == "base" or (target.isdigit() and current.isdigit() and target < current):
        command.downgrade(config, target)
    else:
        command.upgrade(config, target)


def _connect_sqlite(path: str) -> Engine:
    if path != ":memory:":
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(dbapi_connection: Any, _record: Any) -> None:
    dbapi_connection.isolation_level = None  # we begin transactions ourselves
    _switch_to_wal(dbapi_connection)
    dbapi_connection.execute("PRAGMA foreign_keys = ON")
    # A part is renamed after its commit. A power cut must not take back that commit and keep the longer part.
    dbapi_connection.execute("PRAGMA synchronous = FULL")


def _switch_to_wal(dbapi_connection: sqlite3.Connection) -> None:
    """Turns WAL on; only the switch itself can meet a lock that the busy timeout doesn't wait for."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            dbapi_connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    read_only = connection.get_execution_options().get(_READ_ONLY, False)
    connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")


def _migrate(engine: Engine, url: str) -> None:
    with engine.connect() as connection:
        with connection.execution_options(**{_READ_ONLY: True}).begin():
            if _revision(connection) == SCHEMA_REVISION:
                return
    with engine.begin() as connection:
        revision = _revision(connection)
        if revision is not None and revision > SCHEMA_REVISION:
            raise RefusedError(
                f"the job database {safe_url(url)} has schema {revision}, and the newest that this gristmill "
                f"knows is {SCHEMA_REVISION}: upgrade gristmill, or name another one with --database-url"
            )
        if revision != SCHEMA_REVISION:
            run_migrations(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if revision is None else str(revision)


def _refusal(url: str, error: Exception) -> RefusedError:
    reason = str(getattr(error, "orig", None) or error).splitlines()[0]
    return RefusedError(
        f"the job database {safe_url(url)} can't be opened ({reason}): "
        "name another one with --database-url or GRISTMILL_DATABASE_URL"
    )


@contextmanager
def _translated_errors(engine: Engine) -> Iterator[None]:
    place = safe_url(engine.url.render_as_string(hide_password=True))
    try:
        yield
    except OperationalError as error:
        if "disk is full" in str(error.orig):
            raise OutputError(
                f"disk full under the job database {place}: free space and run the same command again"
            ) from error
        raise StoreError(
            f"the job database {place} failed ({error.orig}): run the same command again"
        ) from error
    except DatabaseError as error:
        raise StoreError(
            f"the job database {place} failed ({error.orig}): run the same command again"
        ) from error
