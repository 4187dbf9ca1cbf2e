"""Database faults as errors of ours: what may work a moment later becomes StoreUnavailable, the rest StoreError.

A worker waits on the first kind for as long as it takes; the second ends a command.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from gristmill.jobs.errors import OutputError, RefusedError, StoreError, StoreUnavailable

# SQLSTATE classes: connection, transaction rollback (serialization, deadlock), resources, operator intervention.
_PASSING_CLASSES = ("08", "40", "53", "57")
_PASSING_STATES = frozenset(
    {
        "25006",  # read-only: a standby, until the fail-over is over
        "25P03",  # idle in a transaction: this process stood still
        "55P03",  # a lock was not given in time
    }
)
_PASSING_SQLITE = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL})
# What a server that starts, stops or is full answers to a new connection: libpq hands on no SQLSTATE there.
_PASSING_ANSWERS = (
    *("starting up", "accepting connections", "shutting down", "recovery mode"),
    *("too many", "terminating connection"),
)


def is_passing(error: SQLAlchemyError) -> bool:
    """Whether the same statement may work a moment later."""
    if isinstance(error, PoolTimeoutError):
        return True  # every connection of the pool is in use
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.Error):
        return _sqlite_code(error) in _PASSING_SQLITE
    if error.connection_invalidated:
        return True
    state = getattr(error.orig, "sqlstate", None)
    if state is not None:
        return state in _PASSING_STATES or state.startswith(_PASSING_CLASSES)
    if not isinstance(error, (OperationalError, InterfaceError)):
        return False
    text = str(error.orig)
    refused_by_server = "FATAL" in text  # wrong password, no such database
    return not refused_by_server or any(answer in text for answer in _PASSING_ANSWERS)


@contextmanager
def opening_errors(place: str) -> Iterator[None]:
    """Faults while a database is opened: RefusedError, or StoreUnavailable when it does not answer now."""
    try:
        yield
    except (OSError, ImportError, SQLAlchemyError) as error:
        if isinstance(error, SQLAlchemyError) and is_passing(error):
            raise _unavailable(place, error) from error
        raise RefusedError(
            f"the job database {place} can't be opened ({_reason(error)}): "
            "name another one with --database-url or GRISTMILL_DATABASE_URL"
        ) from error


@contextmanager
def transaction_errors(place: str) -> Iterator[None]:
    """Faults inside a transaction: StoreUnavailable, OutputError for a full disk, else StoreError."""
    try:
        yield
    except (DBAPIError, PoolTimeoutError) as error:
        if is_passing(error):
            raise _unavailable(place, error) from error
        if isinstance(error, DBAPIError) and _sqlite_code(error) == sqlite3.SQLITE_FULL:
            raise OutputError(
                f"disk full under the job database {place}: free space and run the same command again"
            ) from error
        raise StoreError(
            f"the job database {place} failed ({_reason(error)}): run the same command again"
        ) from error


def _unavailable(place: str, error: SQLAlchemyError) -> StoreUnavailable:
    return StoreUnavailable(
        f"the job database {place} does not answer now ({_reason(error)}): "
        "check that it runs, and run the same command again"
    )


def _sqlite_code(error: DBAPIError) -> int | None:
    """The primary result code; None where SQLite had no part in it."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _reason(error: Exception) -> str:
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
