"""The states of jobs, shards and attempts, and which may follow which. A change is a conditional UPDATE."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """A job's state, in the words of the OpenAI Batch API."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


class ShardState(StrEnum):
    """A shard's state."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Runner(StrEnum):
    """Who runs a job: the process that made it (`gristmill run`), or the workers of the queue."""

    LOCAL = "local"
    WORKERS = "workers"


class AttemptOutcome(StrEnum):
    """How an attempt on a shard ended; `lost` means that another attempt took the shard over."""

    RUNNING = "running"
    DONE = "done"
    REQUEUED = "requeued"
    FAILED = "failed"
    LOST = "lost"


# What may precede each state: the WHERE clause of the UPDATE that enters it.
JOB_STATES_BEFORE: dict[JobState, frozenset[JobState]] = {
    JobState.VALIDATING: frozenset(),
    JobState.IN_PROGRESS: frozenset(
        {
            JobState.VALIDATING,
            JobState.COMPLETED,  # its failed rows are tried again
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.EXPIRED,
        }
    ),
    JobState.FINALIZING: frozenset({JobState.IN_PROGRESS}),
    # Its workers stop and commit what is finished; jobs.stopping_as says what follows.
    JobState.CANCELLING: frozenset({JobState.VALIDATING, JobState.IN_PROGRESS}),
    JobState.COMPLETED: frozenset({JobState.FINALIZING}),
    JobState.FAILED: frozenset({JobState.VALIDATING, JobState.FINALIZING, JobState.CANCELLING}),
    JobState.CANCELLED: frozenset({JobState.CANCELLING}),
    JobState.EXPIRED: frozenset({JobState.CANCELLING}),
}
RESUMABLE_JOB_STATES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
TERMINAL_JOB_STATES = frozenset({JobState.COMPLETED}) | RESUMABLE_JOB_STATES
TERMINAL_SHARD_STATES = frozenset({ShardState.DONE, ShardState.FAILED, ShardState.CANCELLED})
