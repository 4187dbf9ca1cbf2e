"""Values of input columns as text: JSON for lists and structs, ISO for dates. Never "None", never "nan"."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any


def to_json_text(value: Any) -> str:
    """JSON of one column's value: NaN and infinities are null, dates ISO strings, bytes and the rest text.

    Lone surrogates are written as \\uXXXX escapes, so that the result can always be encoded.
    """
    plain = to_plain(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and has_lone_surrogate(text):
        text = json.dumps(plain, ensure_ascii=True, allow_nan=False)
    return text


def to_plain(value: Any) -> Any:
    """The same value made of JSON's own types only."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else to_scalar_text(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() and abs(value) < 2**53 else float(value)
    return to_scalar_text(value)


def to_scalar_text(value: Any) -> str:
    """Text of one scalar: dates ISO, decimals in plain digits, bytes as UTF-8 (bad bytes U+FFFD)."""
    if isinstance(value, (date, datetime, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    return str(value)


def has_lone_surrogate(text: str) -> bool:
    """Whether the text can't be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def encode_text(text: str) -> bytes:
    """UTF-8, with U+FFFD for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
