"""One output row: a completion or an error, with the identity of the input row it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SKIPPED = "skipped"  # finish_reason of a row that --on-null skip left out: no completion, no error


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one input row: a completion, an error_code, or finish_reason `skipped`; exactly one."""

    source_index: int
    row_index: int
    custom_id: str | None = None
    kept: tuple[Any, ...] = ()  # in the order of --keep; shorter (or empty) where the row could not be read
    completion: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    sample_index: int = 0
