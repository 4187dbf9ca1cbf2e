"""What goes wrong in a run, written to the job's history. A database that does not answer is not waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gristmill.engine.errors import EngineDied
from gristmill.jobs.errors import Unavailable
from gristmill.jobs.store.store import Store
from gristmill.worker.run.shard_work import ShardWork


class RunEvents:
    """Writes events; used by the runner's loop."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def engine_died(self, died: EngineDied, hit: Sequence[ShardWork]) -> None:
        """The engine died with rows of these shards in it: each shard counts it."""
        facts = {"exit_code": died.exit_code, "num_in_flight": len(died.in_flight), "message": str(died)}
        with suppress(Unavailable):
            for work in hit:
                self._store.shards.record_crash(work.claim)
            for job_id in {work.claim.job_id for work in hit}:
                self._store.jobs.record_event(job_id, "engine_died", facts)

    def shard_lost(self, work: ShardWork) -> None:
        """Another attempt owns the shard."""
        facts = {"shard_index": work.claim.range.shard_index, "fence": work.claim.fence}
        with suppress(Unavailable):
            self._store.jobs.record_event(work.claim.job_id, "shard_lost", facts)
