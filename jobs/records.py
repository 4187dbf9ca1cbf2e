"""The values that the store gives out and takes: jobs, claims, part files, status. No database in here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from jobs.owner import Owner
from jobs.planning import ShardRange
from jobs.sources import Source
from jobs.states import JobState


class Signal(StrEnum):
    """What a heartbeat brings back."""

    CONTINUE = "continue"
    CANCEL = "cancel"  # the job was cancelled, failed or expired: commit what is finished, then stop
    LOST = "lost"  # at least one of the claims belongs to another attempt now


class Heartbeat(NamedTuple):
    """A signal, and which of the claims are lost (the other claims go on)."""

    signal: Signal
    lost_shard_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PartFile:
    """One shard's output: its name once published, the attempt it comes from, and what it must hold."""

    path: str  # part-00042.parquet, relative to the output folder
    attempt: str  # _attempts/00042-3-1f0c..., where it lies until it is published
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """The right to commit a shard, for as long as its fence is the highest."""

    shard_id: int
    job_id: str
    fence: int
    attempt_id: int
    owner: Owner
    range: ShardRange
    part: PartFile | None  # committed by earlier attempts: these rows need no computing
    crash_count: int


@dataclass(frozen=True, slots=True)
class FinalizeClaim:
    """The right to finalize a job."""

    job_id: str
    fence: int
    owner: Owner


class CommittedPart(NamedTuple):
    """The part that counts for a shard, and how many of its rows are errors."""

    shard_id: int
    part: PartFile
    rows_failed: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job as the database holds it. Times are seconds since 1970, UTC."""

    job_id: str
    state: JobState
    message: str | None  # why it failed, one line
    identity: str
    fingerprint: str
    model: str
    output: str
    spec: dict[str, Any]  # JobSpec.model_validate(spec) gives the order back
    sources: tuple[Source, ...]
    part_schema: bytes  # parts.load_part_schema(part_schema)
    num_rows: int
    num_shards: int
    rows_committed: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    owner: Owner | None  # the process that holds it
    owner_seen_at: float | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Everything `gristmill status --json` shows. rows = completed + failed + skipped + not_run, always."""

    job_id: str
    state: str
    message: str | None
    model: str
    output: str
    fingerprint: str
    owner: str | None
    created_at: float
    started_at: float | None
    finished_at: float | None
    elapsed_s: float  # while a process worked on the job; pauses between runs are not counted
    eta_s: float | None
    rows: int
    rows_done: int  # committed, and reported by heartbeats since
    completed: int
    failed: int
    skipped: int
    not_run: int
    errors_by_code: dict[str, int]
    finish_reasons: dict[str, int]  # of completed rows
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    rows_per_s: float | None
    tokens_per_s: float | None  # prompt and completion tokens
    completion_tokens_per_s: float | None
    saved_tokens_share: float | None  # cached / prompt tokens
    preemptions: int
    kv_waste: float | None
    step_budget_utilization: float | None
    percentiles: dict[str, dict[str, float | None]]
    shards: dict[str, int]  # by state
