"""Writes parts and commits shards in a thread of its own, so that the engine never waits for a disk.

One thread: the commits of a shard follow each other, each merging the part of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from jobs.parts import write_attempt
from jobs.publishing import publish_part
from jobs.records import PartFile, ShardClaim
from jobs.sources import Source
from jobs.storage import LocalStorage
from jobs.store import Store
from worker.shard_work import Uncommitted

CommitKind = Literal["complete", "checkpoint", "requeue"]


@dataclass(frozen=True, slots=True)
class OutputTarget:
    """Where a job's parts go and what they look like."""

    storage: LocalStorage
    schema: pa.Schema
    output_format: Literal["parquet", "jsonl"]
    sources: Sequence[Source]


@dataclass(frozen=True, slots=True)
class Committed:
    """The end of one commit. `part` is what the shard holds now; is_lost: another attempt owns the shard."""

    shard_id: int
    kind: CommitKind
    part: PartFile | None
    is_lost: bool


class Committer:
    """Submitted commits run in order; the loop takes their outcomes, and what the thread raised with them."""

    def __init__(self, store: Store, target: OutputTarget) -> None:
        self._store = store
        self._target = target
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._futures: list[Future[Committed]] = []
        self._parts: dict[int, PartFile] = {}  # by shard: newer than the part of its claim

    @property
    def num_waiting(self) -> int:
        return len(self._futures)

    def submit(
        self, claim: ShardClaim, rows: Uncommitted, kind: CommitKind, failure: str | None = None
    ) -> None:
        """Commits `rows` in addition to the shard's part. With `failure` the shard fails afterwards."""
        self._futures.append(self._executor.submit(self._commit, claim, rows, kind, failure))

    def take_done(self) -> list[Committed]:
        """The commits that ended since the last call, in order."""
        done: list[Committed] = []
        while self._futures and self._futures[0].done():
            done.append(self._futures.pop(0).result())
        return done

    def wait(self) -> list[Committed]:
        """Waits for all that was submitted."""
        done = [future.result() for future in self._futures]
        self._futures.clear()
        return done

    def close(self) -> None:
        """Ends the thread; what was not started is dropped (its rows are computed again)."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _commit(
        self, claim: ShardClaim, rows: Uncommitted, kind: CommitKind, failure: str | None
    ) -> Committed:
        """Runs in the thread: write the attempt, make it count, give it its name."""
        claim = replace(claim, part=self._parts.get(claim.shard_id, claim.part))
        part: PartFile | None = None
        if rows.results or (kind == "complete" and claim.part is None):
            part = write_attempt(
                self._target.storage,
                claim,
                rows.results,
                self._target.schema,
                self._target.sources,
                self._target.output_format,
            )
        accepted = self._store.commit_shard(
            claim,
            part,
            rows.counts,
            rows.stats,
            complete=kind == "complete",
            requeue=kind == "requeue" and failure is None,
        )
        if accepted and part is not None:
            publish_part(self._target.storage, self._store, claim.shard_id, part)
            self._parts[claim.shard_id] = part
        if accepted and failure is not None:
            self._store.fail_shard(replace(claim, part=self._parts.get(claim.shard_id, claim.part)), failure)
        if kind != "checkpoint":
            self._parts.pop(claim.shard_id, None)
        return Committed(claim.shard_id, kind, part or claim.part, is_lost=not accepted)
