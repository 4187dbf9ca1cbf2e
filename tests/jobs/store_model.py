"""What test_store_machine.py expects of two jobs and their shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gristmill.jobs.records import JobRecord
from gristmill.jobs.storage.folder import Storage


@dataclass
class ShardModel:
    """What one shard must be: its state, its newest fence, when its lease ends, and which rows count."""

    rows_wanted: frozenset[int]
    state: str = "queued"
    fence: int = 0
    lease_until: float = 0.0
    rows: set[int] = field(default_factory=set)
    errors: set[int] = field(default_factory=set)
    strip: bool = False

    def is_free(self, now: float) -> bool:
        """Whether a claim may take it."""
        return self.state == "queued" or (self.state == "running" and self.lease_until < now)


@dataclass
class JobModel:
    """One job, its folder, and what it must be."""

    job: JobRecord
    folder: Path
    storage: Storage
    shards: list[ShardModel]
    state: str = "in_progress"
    stopping_as: str = ""
    deadline_at: float = float("inf")

    @property
    def rows(self) -> set[int]:
        return set().union(*(shard.rows for shard in self.shards))

    @property
    def errors(self) -> set[int]:
        return set().union(*(shard.errors for shard in self.shards))

    def free(self, now: float) -> list[int]:
        """The shards that a claim may take, lowest first."""
        return [index for index, shard in enumerate(self.shards) if shard.is_free(now)]

    def reopen(self, now: float, errors: bool) -> None:
        """What a resume does, or with `errors` a retry of the failed rows."""
        self.state = "in_progress"
        if self.deadline_at <= now:
            self.deadline_at = float("inf")
        for shard in self.shards:
            shard.strip = shard.strip or (errors and bool(shard.errors))
            redone = errors and shard.state == "done" and shard.errors
            if shard.state in ("cancelled", "failed") or redone:
                shard.state = "queued"
