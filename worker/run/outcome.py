"""How a run of the shard loop is set up, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunEnd(StrEnum):
    """Why a run of the loop ended."""

    FINISHED = "finished"  # no shard is left to claim
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"  # from another process; also a job that was failed or expired there
    TOO_MANY_ERRORS = "too_many_errors"
    ENGINE_FAILED = "engine_failed"  # it dies whatever it is given


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Intervals, and the most failed rows that a local job accepts."""

    max_errors: int | None = None
    checkpoint_s: float = 60.0  # finished rows wait no longer than this for a commit
    checkpoint_chars: int = 64_000_000  # nor for longer once a shard's results hold so much text
    heartbeat_s: float = 15.0  # a quarter of the lease
    housekeeping_s: float = 1.0  # how soon a cancel is noticed
    display_s: float = 0.2


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run, and one line about it where that says more."""

    end: RunEnd
    message: str | None = None
