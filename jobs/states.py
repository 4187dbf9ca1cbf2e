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
        {JobState.VALIDATING, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED}
    ),
    JobState.FINALIZING: frozenset({JobState.IN_PROGRESS}),
    JobState.CANCELLING: frozenset({JobState.IN_PROGRESS}),
    JobState.COMPLETED: frozenset({JobState.FINALIZING}),
    JobState.FAILED: frozenset({JobState.VALIDATING, JobState.FINALIZING}),
    JobState.CANCELLED: frozenset({JobState.CANCELLING}),
    JobState.EXPIRED: frozenset({JobState.IN_PROGRESS}),
}
RESUMABLE_JOB_STATES = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
TERMINAL_JOB_STATES = frozenset({JobState.COMPLETED}) | RESUMABLE_JOB_STATES
TERMINAL_SHARD_STATES = frozenset({ShardState.DONE, ShardState.FAILED, ShardState.CANCELLED})
