"""The loop that takes a job's shards through the engine: claim, prepare ahead, feed, collect, commit.

One thread owns the engine client and the books; preparing and committing have a thread each. Two shards are
active at a time, so that the engine never runs dry at a shard's border. Whatever ends the loop, finished rows
are committed first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from engine.errors import EngineDied, EngineError, ModelRefused
from jobs.errors import JobsError
from jobs.owner import Owner
from jobs.records import JobStatus, Signal
from jobs.store import Store
from worker.committer import CommitKind, Committer
from worker.engine_feed import MAX_DEATHS, EngineFeed
from worker.prepare_ahead import PrepareAhead
from worker.progress import Display, MovingRate
from worker.shard_book import ShardBook
from worker.shard_work import ShardWork

NUM_ACTIVE_SHARDS = 2
MAX_ACTIVE_SHARDS = 8  # where shards are small beside the credit window
MAX_WAITING_COMMITS = 2
_HUNGRY_POLL_S = 0.005  # the engine could take more rows: look at the prepared ones often
_BUSY_POLL_S = 0.05


class RunEnd(StrEnum):
    """Why a run of the loop ended."""

    FINISHED = "finished"  # no shard is left to claim
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"  # from another process; also a job that was failed or expired there
    TOO_MANY_ERRORS = "too_many_errors"
    ENGINE_FAILED = "engine_failed"  # it dies whatever it is given


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Intervals, and the most failed rows that the job accepts."""

    max_errors: int | None = None
    checkpoint_s: float = 60.0  # finished rows wait no longer than this for a commit
    checkpoint_chars: int = 64_000_000  # nor for longer once a shard's results hold so much text
    heartbeat_s: float = 15.0  # a quarter of the lease
    housekeeping_s: float = 1.0  # how soon a cancel is noticed
    display_s: float = 0.2


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run, and one line about it where that says more."""

    end: RunEnd
    message: str | None = None


class ShardRunner:
    """Runs one job's shards in this process. Call `run` once."""

    def __init__(
        self,
        store: Store,
        status: JobStatus,
        owner: Owner,
        feed: EngineFeed,
        ahead: PrepareAhead,
        committer: Committer,
        display: Display,
        should_stop: Callable[[], bool],
        options: RunnerOptions,
    ) -> None:
        self._store = store
        self._job_id = status.job_id
        self._owner = owner
        self._feed = feed
        self._ahead = ahead
        self._committer = committer
        self._display = display
        self._should_stop = should_stop
        self._options = options
        self._book = ShardBook(status)
        self._is_all_claimed = False
        self._has_finished_rows = False  # since the engine was last given up on
        self._end: RunOutcome | None = None
        self._busy_s = 0.0  # the engine had rows, since the last commit
        self._last_s = self._heartbeat_s = self._housekeeping_s = time.monotonic()
        self._display_s = 0.0
        self._token_rate = MovingRate()

    def run(self) -> RunOutcome:
        """Works until nothing is left or something ends it, then commits what is finished."""
        try:
            while (outcome := self.run_once(time.monotonic())) is None:
                pass
            if outcome.end is RunEnd.FINISHED:
                self._feed.close()
            else:
                self._wind_down()
            self._display.update(self._book.progress())
            return outcome
        except (JobsError, EngineError):
            self._release()
            raise
        finally:
            self._feed.kill()
            self._ahead.close()
            self._committer.close()

    def run_once(self, now: float) -> RunOutcome | None:
        """One turn of the loop; the outcome once it is over."""
        if self._feed.num_in_flight:
            self._busy_s += now - self._last_s
        self._last_s = now
        self._settle_commits()
        self._claim_shards(now)
        self._take_prepared(now)
        self._feed.top_up()
        self._poll_engine(now)
        for work in self._book.active:
            if work.is_finished:
                self._close(work, now, "complete")
        self._keep_house(now)
        return self._find_end()

    def _find_end(self) -> RunOutcome | None:
        if self._end is not None:
            return self._end
        if self._should_stop():
            return RunOutcome(RunEnd.INTERRUPTED)
        limit, num_failed = self._options.max_errors, self._book.counts().failed
        if limit is not None and num_failed > limit:
            message = f"{num_failed} rows failed, more than the {limit} that --max-errors accepts"
            return RunOutcome(RunEnd.TOO_MANY_ERRORS, message)
        if self._is_all_claimed and self._book.is_empty:
            return RunOutcome(RunEnd.FINISHED)
        return None

    def _claim_shards(self, now: float) -> None:
        """Keeps two shards active, more where they are small beside the credit window."""
        while not self._is_all_claimed and self._committer.num_waiting <= MAX_WAITING_COMMITS:
            active = self._book.active
            is_window_covered = sum(work.num_left for work in active) >= self._feed.max_rows_in_flight
            if len(active) >= (NUM_ACTIVE_SHARDS if is_window_covered else MAX_ACTIVE_SHARDS):
                return
            claim = self._store.claim_shard(self._job_id, self._owner)
            if claim is None:
                self._is_all_claimed = True
                return
            self._book.open(claim, now)
            self._ahead.submit(claim)

    def _take_prepared(self, now: float) -> None:
        while self._feed.wants_rows and (prepared := self._ahead.take()) is not None:
            work = self._book.get(prepared.claim.shard_id)
            if work is None or work.claim != prepared.claim or work.is_closing:
                continue  # of a shard that failed or was lost
            if prepared.error is not None:
                self._feed.cancel(self._book.drop_pending(work))
                self._close(work, now, "requeue", failure=str(prepared.error))
            elif prepared.batch is None:
                work.is_read = True
            else:
                self._book.record_batch(work, prepared.batch)
                self._feed.push(prepared.batch.requests)

    def _poll_engine(self, now: float) -> None:
        is_hungry = self._feed.wants_rows and any(not work.is_read for work in self._book.active)
        is_waiting = self._feed.num_in_flight and not is_hungry
        try:
            completions = self._feed.poll(_BUSY_POLL_S if is_waiting else _HUNGRY_POLL_S)
        except EngineDied as died:
            self._survive(died, now)
            return
        except ModelRefused as refused:  # it was there when the run began
            self._end = RunOutcome(RunEnd.ENGINE_FAILED, str(refused))
            return
        if completions:
            self._book.record_completions(completions)
            self._has_finished_rows = True

    def _survive(self, died: EngineDied, now: float) -> None:
        """Restarts the engine with the rows in flight; after too many deaths gives their shards up."""
        hit = self._book.works_of(died.in_flight)
        for work in hit:
            self._store.record_crash(work.claim)
        facts = {"exit_code": died.exit_code, "num_in_flight": len(died.in_flight), "message": str(died)}
        self._store.record_event(self._job_id, "engine_died", facts)
        if self._feed.restart():
            self._display.note(f"{died}; started again, {len(died.in_flight)} rows go in again")
            return
        message = f"the engine died {MAX_DEATHS} times without finishing a row; the last time: {died}"
        self._display.note(message)
        request_ids: set[int] = set()
        for work in hit:
            request_ids |= self._book.drop_pending(work)
            self._close(work, now, "requeue", failure=message)
        if not self._has_finished_rows or not hit:
            self._end = RunOutcome(RunEnd.ENGINE_FAILED, message)
            return
        self._has_finished_rows = False
        self._feed.restart_without(request_ids)

    def _close(self, work: ShardWork, now: float, kind: CommitKind, failure: str | None = None) -> None:
        work.is_closing = True
        self._commit(work, now, kind, failure)

    def _commit(self, work: ShardWork, now: float, kind: CommitKind, failure: str | None = None) -> None:
        taken = self._book.take_uncommitted(work, now, self._feed.counters, self._busy_s)
        self._busy_s = 0.0
        self._committer.submit(work.claim, taken, kind, failure)

    def _settle_commits(self) -> None:
        for committed in self._committer.take_done():
            work = self._book.get(committed.shard_id)
            if work is None:
                continue
            if committed.is_lost:
                self._forget(work)
            elif committed.kind != "checkpoint":
                self._book.settle(work)

    def _keep_house(self, now: float) -> None:
        """What is due by the clock: display, heartbeat, checkpoints, a cancel from elsewhere."""
        if now - self._display_s >= self._options.display_s:
            self._display_s = now
            self._token_rate.push(now, self._feed.counters.num_output_tokens)
            self._display.update(self._book.progress(self._token_rate.per_s()))
        if now - self._housekeeping_s < self._options.housekeeping_s:
            return
        self._housekeeping_s = now
        if self._feed.kill_if_hung(now):
            self._display.note("the engine said nothing for too long and was stopped")
        for work in self._book.active:
            is_due = now - work.last_commit_s >= self._options.checkpoint_s
            if work.has_new_rows and (is_due or work.num_new_chars >= self._options.checkpoint_chars):
                self._commit(work, now, "checkpoint")
        if self._beat(now) is Signal.CANCEL:
            self._end = RunOutcome(RunEnd.CANCELLED)

    def _beat(self, now: float) -> Signal:
        works = self._book.works
        is_due = now - self._heartbeat_s >= self._options.heartbeat_s
        if not works or not is_due or not self._feed.is_reporting(now):
            return self._store.touch_job(self._job_id, self._owner)
        self._heartbeat_s = now
        heartbeat = self._store.heartbeat(
            [work.claim for work in works], {work.claim.shard_id: work.num_done for work in works}
        )
        for work in works:
            # The claim of a closing shard ends with its commit, which will tell whether it was lost.
            if work.claim.shard_id in heartbeat.lost_shard_ids and not work.is_closing:
                self._forget(work)
        return heartbeat.signal

    def _forget(self, work: ShardWork) -> None:
        """Another attempt owns the shard: nothing of it may be committed here."""
        facts = {"shard_index": work.claim.range.shard_index, "fence": work.claim.fence}
        self._store.record_event(self._job_id, "shard_lost", facts)
        self._feed.cancel(self._book.drop_pending(work))
        self._book.settle(work)
        self._is_all_claimed = False

    def _wind_down(self) -> None:
        """Stops at once: the engine goes, what it finished is committed, the rest is queued again."""
        self._feed.kill()
        try:
            while completions := self._feed.poll(0.0):
                self._book.record_completions(completions)
        except EngineError:  # it is dead by our own hand
            pass
        now = time.monotonic()
        for work in self._book.active:
            self._close(work, now, "complete" if work.is_finished else "requeue")
        self._committer.wait()

    def _release(self) -> None:
        """After an error: gives the shards back as far as the database still answers."""
        self._feed.kill()
        self._committer.close()
        with suppress(JobsError):
            for work in self._book.works:
                self._store.release_shard(work.claim)
