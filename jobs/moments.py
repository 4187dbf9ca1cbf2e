"""Moments as people write them: ISO 8601, or a duration from now."""

from __future__ import annotations

import re
from datetime import UTC, datetime

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_moment(text: str, now: float) -> float:
    """Seconds since 1970 of `2026-12-01T02:00Z`, or of `90s`, `30m`, `2h`, `1d` after `now`.

    A time without a zone is UTC. Raises ValueError that says how to write it.
    """
    duration = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd])", text.strip())
    if duration is not None:
        return now + float(duration[1]) * _UNITS[duration[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("write a time like 2026-12-01T02:00Z, or a duration like 90s, 30m, 2h, 1d") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
