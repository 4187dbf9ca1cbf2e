"""What a run tells its services and hears of them beside its commits: heartbeats, events, that one does not answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from gristmill.engine.errors import EngineDied
from gristmill.jobs.errors import Unavailable
from gristmill.jobs.records import Signal
from gristmill.jobs.store.store import Store
from gristmill.worker.run.shard_source import ShardSource
from gristmill.worker.run.shard_work import ShardWork
from gristmill.worker.show.progress import Display

RETRY_S = 2.0


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


class RunEvents:
    """What goes wrong, written to the job's history. A database that does not answer is not waited for."""

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


class ServiceWait:
    """A service that does not answer: nothing is asked of any for a while, and one note says so."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._until_s = 0.0
        self._is_noted = False

    def is_over(self, now: float) -> bool:
        return now >= self._until_s

    def begin(self, error: Unavailable, now: float) -> None:
        """A service did not answer."""
        self._until_s = now + RETRY_S
        if not self._is_noted:
            self._display.note(f"{error}; waiting for it")
        self._is_noted = True

    def end(self) -> None:
        """It answers."""
        self._is_noted = False
