"""Keeps the claims of a run alive, and brings back what happened to their jobs and shards elsewhere."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gristmill.jobs.records import Signal
from gristmill.jobs.store.store import Store
from gristmill.worker.run.shard_source import ShardSource
from gristmill.worker.run.shard_work import ShardWork


class News(NamedTuple):
    """What a heartbeat brought back."""

    stopped_jobs: Collection[str] = ()
    lost_works: Sequence[ShardWork] = ()


class Heartbeats:
    """Leases are renewed every `interval_s`, and only while the engine reports; jobs are asked for each time."""

    def __init__(self, store: Store, shards: ShardSource, interval_s: float) -> None:
        self._store = store
        self._shards = shards
        self._interval_s = interval_s
        self._last_s = time.monotonic()

    def beat(self, works: Sequence[ShardWork], is_engine_reporting: bool, now: float) -> News:
        """One round. Raises Unavailable when the database does not answer."""
        lost: list[ShardWork] = []
        if works and is_engine_reporting and now - self._last_s >= self._interval_s:
            heartbeat = self._store.shards.heartbeat(
                [work.claim for work in works], {work.claim.shard_id: work.num_done for work in works}
            )
            self._last_s = now
            signals = heartbeat.signal_by_job
            # The claim of a closing shard ends with its commit, which will tell whether it was lost.
            lost = [
                work
                for work in works
                if work.claim.shard_id in heartbeat.lost_shard_ids and not work.is_closing
            ]
        else:
            job_ids = {work.claim.job_id for work in works}
            if self._shards.only_job is not None:
                job_ids.add(self._shards.only_job)
            signals = self._store.jobs.touch(job_ids, self._shards.owner) if job_ids else {}
        stopped = [job_id for job_id, signal in signals.items() if signal is Signal.CANCEL]
        return News(stopped, lost)
