"""One finding of doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """state: ok, warn (works, but worse than it could) or fail (a job can't run)."""

    name: str
    state: str
    detail: str
    remedy: str = ""
