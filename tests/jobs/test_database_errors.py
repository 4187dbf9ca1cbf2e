"""Which faults of a database pass by themselves, so that a worker waits for it."""

from __future__ import annotations

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from gristmill.jobs.store.database_errors import is_passing


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        ("FATAL:  the database system is starting up", True),
        ("FATAL:  the database system is not yet accepting connections", True),
        ("FATAL:  the database system is not accepting connections", True),
        ("FATAL:  the database system is in recovery mode", True),
        ("FATAL:  sorry, too many clients already", True),
        ("Connection refused", True),
        ('FATAL:  password authentication failed for user "mill"', False),
        ('FATAL:  database "tickets" does not exist', False),
    ],
)
def test_a_server_that_starts_or_stops_is_waited_for_and_a_refusal_is_not(answer: str, passes: bool) -> None:
    error = psycopg.OperationalError(f'connection to server at "127.0.0.1", port 5432 failed: {answer}')
    assert is_passing(OperationalError("SELECT 1", {}, error)) is passes
