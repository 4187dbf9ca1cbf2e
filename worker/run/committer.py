"""Writes parts and commits shards in a thread of its own, so that the engine never waits for a disk.

One thread: the commits of a shard follow each other, each merging the part of the one before. A database or
an object store that does not answer is waited for: finished rows are not given up because of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import JobsError, Unavailable
from gristmill.jobs.output.parts import strip_errors, write_attempt
from gristmill.jobs.output.publishing import MANIFEST_NAME, publish_part
from gristmill.jobs.records import PartFile, ShardClaim
from gristmill.jobs.stats import ShardCounts
from gristmill.jobs.store.store import Store
from gristmill.worker.run.job_context import Contexts, JobContext
from gristmill.worker.run.shard_work import Uncommitted

MAX_RETRY_S = 10.0  # between two tries

CommitKind = Literal["complete", "checkpoint", "requeue", "strip"]
ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """The end of one commit. `part` is what the shard holds now; is_lost: another attempt owns the shard."""

    claim: ShardClaim
    kind: CommitKind
    part: PartFile | None
    is_lost: bool
    error: JobsError | None = None  # nothing was committed
    stripped: ShardCounts | None = None  # of the error rows that were taken out, negative


class Committer:
    """Submitted commits run in order; the loop takes their outcomes."""

    def __init__(self, store: Store, contexts: Contexts) -> None:
        self._store = store
        self._contexts = contexts
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._futures: list[Future[Committed]] = []
        self._parts: dict[int, PartFile] = {}  # by shard: newer than the part of its claim
        self._is_hurried = threading.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._futures)

    def submit(
        self, claim: ShardClaim, rows: Uncommitted, kind: CommitKind, failure: str | None = None
    ) -> None:
        """Commits `rows` in addition to the shard's part. With `failure` the shard fails afterwards."""
        self._futures.append(self._executor.submit(self._run, claim, rows, kind, failure))

    def take_done(self) -> list[Committed]:
        """The commits that ended since the last call, in order."""
        done: list[Committed] = []
        while self._futures and self._futures[0].done():
            done.append(self._futures.pop(0).result())
        return done

    def wait(self, patience_s: float) -> list[Committed]:
        """Waits for all that was submitted; after patience_s a service that does not answer is given up."""
        wait(self._futures, patience_s)
        self._is_hurried.set()
        done = [future.result() for future in self._futures]
        self._futures.clear()
        return done

    def close(self) -> None:
        """Ends the thread; what was not started is dropped (its rows are computed again)."""
        self._is_hurried.set()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, claim: ShardClaim, rows: Uncommitted, kind: CommitKind, failure: str | None) -> Committed:
        """Runs in the thread."""
        claim = replace(claim, part=self._parts.get(claim.shard_id, claim.part))
        try:
            committed = self._strip(claim) if kind == "strip" else self._commit(claim, rows, kind, failure)
        except JobsError as error:
            committed = Committed(claim, kind, claim.part, is_lost=False, error=error)
        if kind in ("complete", "requeue"):
            self._parts.pop(claim.shard_id, None)
        return committed

    def _commit(
        self, claim: ShardClaim, rows: Uncommitted, kind: CommitKind, failure: str | None
    ) -> Committed:
        """Write the attempt, make it count, give it its name."""
        part: PartFile | None = None
        context: JobContext | None = None
        if rows.results or (kind == "complete" and claim.part is None):
            context = self._patiently(lambda: self._contexts.get(claim.job_id))
            target = context.target
            part = self._patiently(
                lambda: write_attempt(
                    target.storage, claim, rows.results, target.schema, target.sources, target.output_format
                )
            )
        reach("commit.before")
        accepted = self._patiently(
            lambda: self._store.shards.commit(
                claim,
                part,
                rows.counts,
                rows.stats,
                complete=kind == "complete",
                requeue=kind == "requeue" and failure is None,
            )
        )
        reach("commit.after")
        if not accepted:
            if part is not None and context is not None:
                self._discard(part, context)
            return Committed(claim, kind, claim.part, is_lost=True)
        if part is not None and context is not None:
            self._publish(claim, part, context)
        if failure is not None:
            self._patiently(lambda: self._store.shards.fail(claim, failure))
        if context is not None and context.max_errors is not None and rows.counts.failed:
            max_errors = context.max_errors
            self._patiently(lambda: self._store.ends.stop_if_too_many_errors(claim.job_id, max_errors))
        return Committed(claim, kind, part or claim.part, is_lost=False)

    def _strip(self, claim: ShardClaim) -> Committed:
        """Takes the error rows out of the part: they are asked for anew, and the job is not complete."""
        context = self._patiently(lambda: self._contexts.get(claim.job_id))
        target = context.target
        self._patiently(lambda: target.storage.delete(MANIFEST_NAME))
        part, counts, stats = self._patiently(
            lambda: strip_errors(target.storage, claim, target.schema, target.sources, target.output_format)
        )
        accepted = self._patiently(
            lambda: self._store.shards.commit(claim, part, counts, stats, clear_strip=True)
        )
        if not accepted:
            self._discard(part, context)
            return Committed(claim, "strip", claim.part, is_lost=True)
        self._publish(claim, part, context)
        return Committed(claim, "strip", part, is_lost=False, stripped=counts)

    def _discard(self, part: PartFile, context: JobContext) -> None:
        """Removes the file of a refused commit: the job may have ended, and its folder been swept, meanwhile."""
        with suppress(JobsError):
            context.target.storage.delete(part.attempt)

    def _publish(self, claim: ShardClaim, part: PartFile, context: JobContext) -> None:
        self._patiently(
            lambda: publish_part(context.target.storage, self._store.shards, claim.shard_id, part)
        )
        self._parts[claim.shard_id] = part

    def _patiently(self, call: Callable[[], ResultT]) -> ResultT:
        """Calls until the service answers, or until it is to be given up."""
        delay_s, is_first = 0.5, True
        while True:
            try:
                return call()
            except Unavailable as error:
                if is_first:
                    logger.warning("a commit waits: %s", error)
                is_first = False
                if self._is_hurried.wait(delay_s):
                    raise
                delay_s = min(delay_s * 2, MAX_RETRY_S)
