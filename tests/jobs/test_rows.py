"""The user's own id, and values as text."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from gristmill.jobs.row_errors import ROW_ERROR_CODES, RowError
from gristmill.jobs.rows import Row
from gristmill.jobs.values import to_json_text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        ("", ""),
        (7, "7"),
        (None, None),
        (float("nan"), None),
        (1.5, "1.5"),
        (True, "true"),
        (["a", 1], '["a", 1]'),
        ("\ud800x", "\ufffdx"),
        ("tiếng Việt 🙂", "tiếng Việt 🙂"),
    ],
)
def test_a_custom_id_is_text_that_can_be_stored(value: Any, expected: str | None) -> None:
    assert Row(0, 0, {"custom_id": value}).custom_id == expected


def test_a_row_without_values_has_no_custom_id() -> None:
    assert Row(0, 0, None, RowError("invalid_json", "x")).custom_id is None
    assert Row(0, 0, {"a": 1}).custom_id is None


def test_json_text_never_holds_nan_and_can_always_be_encoded() -> None:
    value = {
        "n": float("nan"),
        "i": float("inf"),
        "d": date(2020, 1, 2),
        "t": datetime(2020, 1, 2, 3),
        "x": "\ud800",
    }
    text = to_json_text([value, Decimal("1.50"), b"\xff", (1, None)])
    text.encode("utf-8")
    assert json.loads(text) == [
        {"n": None, "i": None, "d": "2020-01-02", "t": "2020-01-02T03:00:00", "x": "\ud800"},
        1.5,
        "\ufffd",
        [1, None],
    ]
    assert to_json_text("é") == '"é"'


def test_every_code_is_explained() -> None:
    assert all(code.islower() and text for code, text in ROW_ERROR_CODES.items())
