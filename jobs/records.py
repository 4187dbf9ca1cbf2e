"""The values that the store gives out and takes: jobs, claims, part files, status. No database in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from gristmill.jobs.owner import Owner
from gristmill.jobs.source import ShardRange, Source
from gristmill.jobs.states import JobState, Runner

PRIORITIES = ("high", "normal", "low")  # jobs.priority holds the index


class Signal(StrEnum):
    """What a job's heartbeat brings back."""

    CONTINUE = "continue"
    CANCEL = "cancel"  # the job was cancelled, failed or expired: commit what is finished, then stop


class Heartbeat(NamedTuple):
    """A signal for each job of the claims, and which claims belong to other attempts now (the others go on)."""

    signal_by_job: Mapping[str, Signal]
    lost_shard_ids: frozenset[int] = frozenset()


class ModelOffer(NamedTuple):
    """A model that a process can run: its name, the dtypes a job may ask for, the fingerprint it would have."""

    name: str
    dtypes: tuple[str, ...]
    fingerprint: str
    job_id: str | None = None  # of a run: it works on this job alone; None: on the jobs of the queue


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
    strip_errors: bool = False  # first take the error rows out of the part: they are to be computed again


@dataclass(frozen=True, slots=True)
class FinalizeClaim:
    """The right to finalize a job."""

    job_id: str
    fence: int
    owner: Owner


class Submitted(NamedTuple):
    """The job of a submission; is_new False: its idempotency key was seen before, and this is its job."""

    job: JobRecord
    is_new: bool


class PieceRecord(NamedTuple):
    """One piece of a large plan: a source, or byte_size bytes of it; `ranges` once it is cut into shards."""

    job_id: str
    piece_index: int
    source_index: int
    byte_offset: int
    byte_size: int  # 0: the whole source
    ranges: str | None  # JSON of plan_pieces.ranges_to_json


class LoadedPiece(NamedTuple):
    """A piece and its source, for the one who plans it."""

    source: Source
    piece: PieceRecord


class Notice(NamedTuple):
    """A message that tells the submitter's own task how its job ended."""

    job_id: str
    task: str
    queue: str
    number: int  # 1 for the first
    payload: dict[str, Any]


class WorkerModel(NamedTuple):
    """A model as a worker offers it."""

    name: str
    fingerprint: str
    dtype: str
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker process as the database knows it. Times are seconds since 1970, UTC."""

    worker_id: str
    owner: Owner
    version: str
    state: str  # busy, idle, stopped, or lost: not seen lately
    models: tuple[WorkerModel, ...]
    num_shards: int
    num_rows_in_flight: int
    started_at: float
    seen_at: float
    stopped_at: float | None
    message: str | None


class CleanReport(NamedTuple):
    """What was deleted from the database; files are never touched."""

    job_ids: tuple[str, ...]
    num_workers: int


class FinishedShard(NamedTuple):
    """A shard at the end of its job."""

    range: ShardRange
    part: PartFile | None
    rows_failed: int


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
    runner: Runner = Runner.LOCAL
    columns: tuple[str, ...] = ()  # of the input; (): unknown
    dtype: str = "auto"
    priority: str = "normal"  # one of PRIORITIES
    prefix_key: str | None = None
    idempotency_key: str | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    stopping_as: JobState | None = None  # while cancelling: the state that follows
    on_complete: str | None = None  # TASK or TASK@QUEUE


def offer_for(job: JobRecord) -> ModelOffer:
    """What a run of this job offers."""
    return ModelOffer(job.model, (job.dtype,), job.fingerprint, job.job_id)


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
    runner: str = "local"
    priority: str = "normal"
    idempotency_key: str | None = None
    not_before: float | None = None
    deadline_at: float | None = None
    num_workers: int = 0  # processes that hold a shard
    is_live: bool = False  # a process runs it, or could take it up at once
    # What sorting the rows by prefix saves; None: they were not sorted.
    regrouped: dict[str, Any] | None = None
