"""Connections to the job database (SQLite or PostgreSQL), and its schema. Knows nothing of jobs or shards.

On SQLite every writing transaction is BEGIN IMMEDIATE: a deferred one that turns to writing fails with
"database is locked" as soon as two processes do it. No transaction may wait for anything but the database:
PostgreSQL ends one that stands still, so that a paused process blocks nobody for long.
"""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.store.database_errors import opening_errors, transaction_errors
from gristmill.jobs.store.models import LEASE_S

if TYPE_CHECKING:
    from alembic.config import Config

SCHEMA_REVISION = "0003"  # the newest revision in migrations/versions
BUSY_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10
IDLE_IN_TRANSACTION_S = 10
# A server that vanished without a word is noticed within a minute; the system's own default is two hours.
_KEEPALIVE = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
_MIGRATION_LOCK = 0x67726973746D696C  # an advisory lock's number: "gristmil"
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
    """An engine for `url`, its schema migrated to SCHEMA_REVISION.

    Raises RefusedError when that can't be, StoreUnavailable while the server does not answer.
    """
    engine = _build_engine(url)
    try:
        with opening_errors(safe_url(url)):
            _migrate_if_older(engine, url)
    except BaseException:
        engine.dispose()
        raise
    return engine


def migrate_database(url: str, target: str = "head") -> str:
    """Moves the schema of `url` up or down to `target`, and says what it did: `0001 -> 0003`.

    target: a revision, `head`, or `base` (no tables; all jobs are forgotten). Raises RefusedError for one
    that this version does not have.
    """
    known = [*_known_revisions(), "head", "base"]
    if target not in known:
        raise RefusedError(f"there is no schema revision {target}: give one of {', '.join(known)}")
    engine = _build_engine(url)
    try:
        with opening_errors(safe_url(url)), engine.begin() as connection:
            _lock_schema(connection)
            before = _revision(connection)
            _check_not_newer(before, url)
            run_migrations(connection, target)
            return f"{before or 'no tables'} -> {_revision(connection) or 'no tables'}"
    finally:
        engine.dispose()


class Database:
    """Transactions and the clock of one database, for the subjects of the store. Safe for several threads."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float] | None = None, lease_s: float = LEASE_S
    ) -> None:
        self._engine = engine
        self._clock = clock
        self.lease_s = lease_s  # how long a claim holds without a heartbeat

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    @contextmanager
    def write(self) -> Iterator[tuple[Connection, float]]:
        """A transaction that may change rows, and the time; faults become StoreError or OutputError."""
        with transaction_errors(_place(self._engine)), self._engine.begin() as connection:
            yield connection, self._now(connection)

    @contextmanager
    def read(self) -> Iterator[tuple[Connection, float]]:
        """A transaction that only reads, all from one moment; on SQLite it waits for no writer."""
        with transaction_errors(_place(self._engine)), self._engine.connect() as connection:
            options: dict[str, Any] = {_READ_ONLY: True}
            if connection.dialect.name == "postgresql":
                options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            with connection.execution_options(**options).begin():
                yield connection, self._now(connection)

    def _now(self, connection: Connection) -> float:
        """The database's time, one clock for all owners; `clock` replaces it in tests."""
        if self._clock is not None:
            return self._clock()
        if connection.dialect.name == "sqlite":
            return time.time()  # the file's host is this host
        return float(connection.scalar(text("SELECT extract(epoch FROM clock_timestamp())")))


def run_migrations(connection: Connection, target: str = "head") -> None:
    """Moves the schema to `target` (a revision, head or base) inside the connection's transaction."""
    from alembic import command

    config = _alembic_config()
    config.attributes["connection"] = connection
    current = _revision(connection) or "base"
    if target == "base" or (target.isdigit() and current.isdigit() and target < current):
        command.downgrade(config, target)
    else:
        command.upgrade(config, target)


def _build_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise RefusedError(
            "the database URL can't be read: give one like sqlite:////home/me/jobs.db or postgresql://host/name"
        ) from None
    backend = parsed.drivername.partition("+")[0]
    with opening_errors(safe_url(url)):
        if backend == "sqlite":
            return _build_sqlite(parsed.database or ":memory:")
        if backend in ("postgresql", "postgres"):
            return _build_postgresql(parsed)
    raise RefusedError(
        f"the database {safe_url(url)} is of no kind that Gristmill knows: give a sqlite:/// or postgresql:// URL"
    )


def _build_postgresql(url: URL) -> Engine:
    defaults = {"application_name": "gristmill", "connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=4,
        max_overflow=12,
        pool_timeout=BUSY_TIMEOUT_S,
        pool_pre_ping=True,  # a connection that a restart cut is replaced before it is used
        connect_args={name: value for name, value in defaults.items() if name not in url.query},
    )
    event.listen(engine, "connect", _set_up_postgresql)
    return engine


def _set_up_postgresql(dbapi_connection: Any, _record: Any) -> None:
    with dbapi_connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{BUSY_TIMEOUT_S:.0f}s'")
        cursor.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'")
    dbapi_connection.commit()


def _build_sqlite(path: str) -> Engine:
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


def _migrate_if_older(engine: Engine, url: str) -> None:
    with engine.connect() as connection, connection.execution_options(**{_READ_ONLY: True}).begin():
        if _revision(connection) == SCHEMA_REVISION:
            return
    with engine.begin() as connection:
        _lock_schema(connection)
        revision = _revision(connection)
        _check_not_newer(revision, url)
        if revision != SCHEMA_REVISION:
            run_migrations(connection)


def _lock_schema(connection: Connection) -> None:
    """Lets one process migrate at a time; on SQLite BEGIN IMMEDIATE did that already."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _MIGRATION_LOCK})


def _check_not_newer(revision: str | None, url: str) -> None:
    if revision is not None and revision > SCHEMA_REVISION:
        raise RefusedError(
            f"the job database {safe_url(url)} has schema {revision}, and the newest that this gristmill "
            f"knows is {SCHEMA_REVISION}: upgrade gristmill, or name another one with --database-url"
        )


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if revision is None else str(revision)


def _alembic_config() -> Config:
    from alembic.config import Config

    spec = importlib.util.find_spec("gristmill.migrations")
    assert spec is not None and spec.origin is not None, "the package migrations is installed with jobs"
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    return config


def _known_revisions() -> list[str]:
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_alembic_config())
    return sorted(script.revision for script in scripts.walk_revisions())


def _place(engine: Engine) -> str:
    return safe_url(engine.url.render_as_string(hide_password=True)).replace("+psycopg://", "://", 1)
