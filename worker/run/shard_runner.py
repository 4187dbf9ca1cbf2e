"""The loop that takes shards through the engine: claim, prepare ahead, feed, collect, commit.
One thread owns the engine client and the active shards; preparing and committing have a thread each. The next shard
is claimed before the present one runs out of waiting rows, so that the engine never runs dry at a border.
Whatever ends the loop, finished rows are committed first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from gristmill.engine.errors import EngineDied, EngineError, ModelRefused
from gristmill.jobs.errors import JobsError, SourceError, Unavailable
from gristmill.jobs.states import JobState
from gristmill.jobs.store.store import Store
from gristmill.worker.engine.supervisor import MAX_CULPRITS, EngineSupervisor
from gristmill.worker.run.active_shards import ActiveShards, RunProgress
from gristmill.worker.run.committer import CommitKind, Committed, Committer
from gristmill.worker.run.heartbeats import Heartbeats, RunEvents, ServiceWait
from gristmill.worker.run.job_context import Contexts
from gristmill.worker.run.outcome import RunEnd, RunnerOptions, RunOutcome
from gristmill.worker.run.prepare_ahead import PrepareAhead
from gristmill.worker.run.shard_source import ShardSource
from gristmill.worker.run.shard_work import ShardWork, Uncommitted
from gristmill.worker.show.progress import Display

MAX_ACTIVE_SHARDS = 8  # where shards are small beside the credit window
MAX_WAITING_COMMITS = 2
STOP_PATIENCE_S = 6.0  # for a service that does not answer while we stop
_HUNGRY_POLL_S = 0.005  # the engine could take more rows: look at the prepared ones often
_BUSY_POLL_S = 0.05
_IDLE_POLL_S = 0.2

logger = logging.getLogger(__name__)


class ShardRunner:
    """Runs shards in this process. Call `run` once."""

    def __init__(
        self,
        store: Store,
        shards: ShardSource,
        engine: EngineSupervisor,
        contexts: Contexts,
        display: Display,
        should_stop: Callable[[], bool],
        options: RunnerOptions,
    ) -> None:
        self._store = store
        self._shards = shards
        self._engine = engine
        self._active = ActiveShards(store.jobs.status(shards.only_job) if shards.only_job else None)
        self._preparation = PrepareAhead(contexts)
        self._committer = Committer(store, contexts)
        self._display = display
        self._should_stop = should_stop
        self._options = options
        self._heartbeats = Heartbeats(store, shards, options.heartbeat_s)
        self._end: RunOutcome | None = None
        self._busy_s = 0.0  # the engine had rows, since the last commit
        self._last_s = self._housekeeping_s = time.monotonic()
        self._wait = ServiceWait(display)
        self._events = RunEvents(store)
        self._progress = RunProgress(display, self._active, engine, options.display_s)

    @property
    def num_shards(self) -> int:
        """How many are claimed and not yet settled; from any thread."""
        return len(self._active.works)

    def run(self) -> RunOutcome:
        """Works until nothing is left or something ends it, then commits what is finished."""
        try:
            while (outcome := self.run_once(time.monotonic())) is None:
                pass
            if outcome.end is RunEnd.FINISHED:
                self._engine.close()
            else:
                self._wind_down()
            self._progress.show_end()
            return outcome
        except (JobsError, EngineError):
            self._release()
            raise
        finally:
            self._engine.kill()
            self._preparation.close()
            self._committer.close()

    def run_once(self, now: float) -> RunOutcome | None:
        """One turn of the loop; the outcome once it is over."""
        if self._engine.num_in_flight:
            self._busy_s += now - self._last_s
        self._last_s = now
        for committed in self._committer.take_done():
            self._settle(committed, now)
        self._claim_shards(now)
        self._take_prepared(now)
        self._engine.top_up()
        self._poll_engine(now)
        for work in self._active.active:
            if work.is_finished:
                self._commit(work, now, "complete")
        self._keep_house(now)
        return self._find_end()

    def _find_end(self) -> RunOutcome | None:
        if self._end is not None:
            return self._end
        if self._should_stop():
            return RunOutcome(RunEnd.INTERRUPTED)
        limit = self._options.max_errors
        if limit is not None and (num_failed := self._active.counts().failed) > limit:
            message = f"{num_failed} rows failed, more than the {limit} that --max-errors accepts"
            return RunOutcome(RunEnd.TOO_MANY_ERRORS, message)
        if self._shards.is_exhausted and self._active.is_empty:
            return RunOutcome(RunEnd.FINISHED)
        return None

    def _claim_shards(self, now: float) -> None:
        """Claims until the rows that are left fill the credit window; no further, others may be idle."""
        while self._wait.is_over(now) and self._committer.num_waiting <= MAX_WAITING_COMMITS:
            is_window_full = self._active.num_left >= self._engine.max_rows_in_flight
            if is_window_full or len(self._active.active) >= MAX_ACTIVE_SHARDS:
                return
            try:
                claim = self._shards.claim(now, self._active.has_plenty(now))
            except Unavailable as error:
                self._wait.begin(error, now)
                return
            if claim is None:
                return
            work = self._active.open(claim, now)
            if claim.strip_errors:
                self._committer.submit(claim, Uncommitted(), "strip")
            else:
                self._preparation.submit(work.claim)

    def _take_prepared(self, now: float) -> None:
        while self._engine.wants_rows and (prepared := self._preparation.take()) is not None:
            work = self._active.get(prepared.claim.shard_id)
            if work is None or work.claim != prepared.claim or work.is_closing:
                continue  # of a shard that failed or was lost
            if prepared.error is not None:
                self._give_up(work, prepared.error, now)
            elif prepared.batch is None:
                work.is_read = True
            else:
                self._active.record_batch(work, prepared.batch)
                self._engine.push(prepared.batch.requests)

    def _give_up(self, work: ShardWork, error: JobsError, now: float) -> None:
        """A shard that can't be read: later, where the place does not answer; else it fails."""
        self._engine.cancel(self._active.drop_pending(work))
        if isinstance(error, Unavailable):
            self._wait.begin(error, now)
            self._commit(work, now, "requeue")
        elif isinstance(error, SourceError):
            self._commit(work, now, "requeue", failure=str(error))
        else:
            self._commit(work, now, "requeue")
            self._fail_job(work.claim.job_id, error)

    def _poll_engine(self, now: float) -> None:
        is_hungry = self._engine.wants_rows and any(not work.is_read for work in self._active.active)
        is_busy = self._engine.num_in_flight and not is_hungry
        is_idle = self._active.is_empty and self._shards.only_job is None
        poll_s = _BUSY_POLL_S if is_busy else _IDLE_POLL_S if is_idle else _HUNGRY_POLL_S
        try:
            completions = self._engine.poll(poll_s)
        except EngineDied as died:
            self._survive(died)
            return
        except ModelRefused as refused:  # it was there when the run began
            self._end = RunOutcome(RunEnd.ENGINE_FAILED, str(refused))
            return
        if completions:
            hit = self._active.works_of([completions[-1].request_id])
            self._active.record_completions(completions)
            if self._engine.num_culprits >= MAX_CULPRITS:
                self._stop_deadly_job(hit[0].claim.job_id)

    def _stop_deadly_job(self, job_id: str) -> None:
        """Row after row ended the engine: before all of them are called poisoned, somebody should look."""
        message = f"{MAX_CULPRITS} rows, one after the other, ended the engine process"
        self._engine.num_culprits = 0
        if self._shards.only_job is not None:
            self._end = RunOutcome(RunEnd.ENGINE_FAILED, message)
        else:
            self._fail_job(job_id, JobsError(message))

    def _survive(self, died: EngineDied) -> None:
        self._events.engine_died(died, self._active.works_of(died.in_flight))
        if self._engine.restart():
            self._display.note(f"{died}; started again, {len(died.in_flight)} rows go in again")
            return
        message = f"the engine dies whatever it is given; the last time: {died}"
        self._display.note(message)
        self._end = RunOutcome(RunEnd.ENGINE_FAILED, message)

    def _commit(self, work: ShardWork, now: float, kind: CommitKind, failure: str | None = None) -> None:
        work.is_closing = kind != "checkpoint"
        taken = self._active.take_uncommitted(work, now, self._engine.counters, self._busy_s)
        self._busy_s = 0.0
        self._committer.submit(work.claim, taken, kind, failure)

    def _settle(self, committed: Committed, now: float) -> None:
        work = self._active.get(committed.claim.shard_id)
        if work is None:
            return
        if committed.error is not None:
            self._engine.cancel(self._active.drop_pending(work))
            self._active.settle(work)
            with suppress(Unavailable):
                self._store.shards.release(work.claim)
            self._fail_job(committed.claim.job_id, committed.error)
        elif committed.is_lost:
            self._forget(work)
        elif committed.stripped is not None:
            self._active.take_back(work, committed.part, committed.stripped)
            self._preparation.submit(work.claim)
        elif committed.kind != "checkpoint":
            self._active.settle(work)

    def _fail_job(self, job_id: str, error: JobsError) -> None:
        """A job whose output can't be written, or that may not run here: it stops, and can be resumed."""
        if self._shards.only_job is not None or isinstance(error, Unavailable):
            raise error
        logger.warning("job %s stops: %s", job_id, error)
        with suppress(Unavailable):
            self._store.ends.stop(job_id, JobState.FAILED, str(error))

    def _keep_house(self, now: float) -> None:
        """What is due by the clock: display, heartbeat, checkpoints, a cancel from elsewhere."""
        self._progress.show(now)
        if now - self._housekeeping_s < self._options.housekeeping_s:
            return
        self._housekeeping_s = now
        if self._engine.kill_if_hung(now):
            self._display.note("the engine said nothing for too long and was stopped")
        for work in self._active.due_for_commit(now, self._options):
            self._commit(work, now, "checkpoint")
        if self._wait.is_over(now):
            self._beat(now)

    def _beat(self, now: float) -> None:
        try:
            news = self._heartbeats.beat(self._active.works, self._engine.is_reporting(now), now)
        except Unavailable as error:
            self._wait.begin(error, now)
            return
        self._wait.end()
        for work in news.lost_works:
            self._forget(work)
        for job_id in news.stopped_jobs:
            self._stop_job(job_id, now)

    def _stop_job(self, job_id: str, now: float) -> None:
        """The job was cancelled, failed or expired: its finished rows are committed, the others forgotten."""
        if self._shards.only_job is not None:
            self._end = RunOutcome(RunEnd.CANCELLED)
            return
        for work in self._active.of_job(job_id):
            kind: CommitKind = "complete" if work.is_finished else "requeue"
            self._engine.cancel(self._active.drop_pending(work))
            self._commit(work, now, kind)

    def _forget(self, work: ShardWork) -> None:
        """Another attempt owns the shard: nothing of it may be committed here."""
        self._events.shard_lost(work)
        self._engine.cancel(self._active.drop_pending(work))
        self._active.settle(work)
        self._shards.look_again()

    def _wind_down(self) -> None:
        """Stops at once: the engine goes, what it finished is committed, the rest is queued again."""
        self._active.record_completions(self._engine.kill_and_drain())
        now = time.monotonic()
        for work in self._active.active:
            self._commit(work, now, "complete" if work.is_finished else "requeue")
        for committed in self._committer.wait(STOP_PATIENCE_S):
            if committed.error is not None:
                if self._shards.only_job is not None:
                    raise committed.error
                logger.warning("a shard goes back without its last rows: %s", committed.error)

    def _release(self) -> None:
        """After an error: gives the shards back as far as the database still answers."""
        self._engine.kill()
        self._committer.close()
        with suppress(JobsError):
            for work in self._active.works:
                self._store.shards.release(work.claim)
