"""The thread that prepares shards while the engine works, a few batches ahead so that memory stays flat."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from gristmill.jobs.errors import JobsError
from gristmill.jobs.output.parts import load_done_rows
from gristmill.jobs.records import ShardClaim
from gristmill.worker.run.job_context import Contexts
from gristmill.worker.run.prepare import PreparedBatch

MAX_BATCHES_AHEAD = 2
_STOP_CHECK_S = 0.1
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch of a shard, or with `batch` None the shard's end: all is read, or `error` says why not."""

    claim: ShardClaim
    batch: PreparedBatch | None
    error: JobsError | None = None


class PrepareAhead:
    """Prepares submitted shards in order. `submit`, `take` and `close` belong to the runner's loop."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._claims: queue.SimpleQueue[ShardClaim | None] = queue.SimpleQueue()
        self._batches: queue.Queue[Prepared | Exception] = queue.Queue(MAX_BATCHES_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prepare", daemon=True)
        self._thread.start()

    def submit(self, claim: ShardClaim) -> None:
        """Prepare this shard after those that were submitted before."""
        self._claims.put(claim)

    def take(self, timeout_s: float = 0.0) -> Prepared | None:
        """The next batch; None when there is none within `timeout_s`. Raises what the thread raised."""
        try:
            prepared = self._batches.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(prepared, Exception):
            raise prepared
        return prepared

    def close(self) -> None:
        """Ends the thread after the batch that it is busy with; a slow disk does not hold us up."""
        self._closed.set()
        self._claims.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (claim := self._claims.get()) is not None and not self._closed.is_set():
            try:
                self._prepare(claim)
            except JobsError as error:
                self._put(Prepared(claim, None, error))
            except Exception as error:  # the thread's border: the loop raises it
                self._put(error)
                return

    def _prepare(self, claim: ShardClaim) -> None:
        context = self._contexts.get(claim.job_id)
        target = context.target
        done_rows = load_done_rows(target.storage, claim.part, target.sources)
        for batch in context.preparer.prepare(claim.range, done_rows, target.storage):
            if not self._put(Prepared(claim, batch)):
                return
        self._put(Prepared(claim, None))

    def _put(self, prepared: Prepared | Exception) -> bool:
        while not self._closed.is_set():
            try:
                self._batches.put(prepared, timeout=_STOP_CHECK_S)
                return True
            except queue.Full:
                continue
        return False
