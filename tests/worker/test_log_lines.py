"""A worker's log: one line a record, facts at its end, no details of libraries, no passwords."""

from __future__ import annotations

import logging

import pytest

from gristmill.worker.show.log_lines import LineFormatter, hide_passwords


def format_record(name: str, text: str, **facts: object) -> str:
    record = logging.makeLogRecord(
        {"name": name, "msg": text, "levelname": "WARNING", "created": 1_800_000_000.0, **facts}
    )
    return LineFormatter().format(record)


def test_our_record_is_a_line_with_its_facts() -> None:
    line = format_record("gristmill.worker.serve.serve", "the worker is up", models="m", num_shards=2)
    head = "2027-01-15T08:00:00Z WARNING gristmill.worker.serve.serve: "
    assert line == f"{head}the worker is up models=m num_shards=2"


def test_of_a_library_only_the_first_line_is_kept() -> None:
    facts = {"data": {"kwargs": "private"}, "exc_info": (ValueError, ValueError("private"), None)}
    line = format_record("celery.app.trace", "Task failed\nwith (private)", **facts)
    assert line.endswith("celery.app.trace: Task failed")
    assert len(format_record("kombu", "x" * 9999)) < 400


def test_our_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = (ValueError, ValueError("no\nway"), None)
    assert format_record("gristmill.x", "failed", exc_info=error).endswith("failed (ValueError: no way)")
    monkeypatch.setenv("GRISTMILL_TRACEBACK", "1")
    assert "\nValueError: no" in format_record("gristmill.x", "failed", exc_info=error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at redis://:hush@host:6379/0.", "at redis://:***@host:6379/0."),
        ("postgresql+psycopg://me:hush@host/db", "postgresql+psycopg://me:***@host/db"),
        ("x?user=me&password=hush&a=b", "x?user=me&password=***&a=b"),
        ("s3://bucket/a:b@c, redis://host/0", "s3://bucket/a:b@c, redis://host/0"),
        ("http://user@host/", "http://user@host/"),
    ],
)
def test_passwords_are_blotted_out(text: str, expected: str) -> None:
    assert hide_passwords(text) == expected
