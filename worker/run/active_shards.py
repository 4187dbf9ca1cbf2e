"""The shards of a run in progress: whose each request is, the counts of finished rows, and how they are shown.

The runner's loop keeps them; nothing here talks to the engine, the database or a disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gristmill.engine.request import Completion, EngineCounters
from gristmill.jobs.records import JobStatus, PartFile, ShardClaim
from gristmill.jobs.stats import ShardCounts
from gristmill.worker.engine.supervisor import EngineSupervisor
from gristmill.worker.run.outcome import RunnerOptions
from gristmill.worker.run.prepare import PreparedBatch
from gristmill.worker.run.shard_work import ShardWork, Uncommitted
from gristmill.worker.show.progress import Display, MovingRate, Progress

PLENTY_S = 3.0
RATE_WINDOW_S = 10.0


class ActiveShards:
    """All shards that are claimed and not yet settled."""

    def __init__(self, status: JobStatus | None = None) -> None:
        """`status`: of the one job whose progress is shown; what it has done already counts."""
        self._num_rows = status.rows if status else 0
        self._works: dict[int, ShardWork] = {}  # by shard_id, in the order of claiming
        self._work_by_request: dict[int, ShardWork] = {}
        self._total = ShardCounts()  # of the rows that were handed to a commit
        if status is not None:
            self._total = ShardCounts(
                completed=status.completed,
                failed=status.failed,
                skipped=status.skipped,
                prompt_tokens=status.prompt_tokens,
                completion_tokens=status.completion_tokens,
                cached_tokens=status.cached_tokens,
            )
        self._counted = EngineCounters()
        self._row_rate = MovingRate(RATE_WINDOW_S)

    @property
    def works(self) -> list[ShardWork]:
        """All shards, those whose last commit is on its way included."""
        return list(self._works.values())

    @property
    def active(self) -> list[ShardWork]:
        """The shards that still need rows from the engine or from the preparation."""
        return [work for work in self._works.values() if not work.is_closing]

    def of_job(self, job_id: str) -> list[ShardWork]:
        """The job's active shards."""
        return [work for work in self.active if work.claim.job_id == job_id]

    def due_for_commit(self, now: float, options: RunnerOptions) -> list[ShardWork]:
        """Active shards whose finished rows have waited long enough, or hold much text."""
        return [
            work
            for work in self.active
            if work.has_new_rows
            and (
                now - work.last_commit_s >= options.checkpoint_s
                or work.num_new_chars >= options.checkpoint_chars
            )
        ]

    @property
    def num_left(self) -> int:
        """Rows of the active shards that have no result yet."""
        return sum(work.num_left for work in self.active)

    def has_plenty(self, now: float) -> bool:
        """Whether the rows that are left take a while, at the rate of late."""
        self._row_rate.push(now, self.counts().rows)
        return self.num_left > PLENTY_S * (self._row_rate.per_s() or 0.0)

    @property
    def is_empty(self) -> bool:
        return not self._works

    def get(self, shard_id: int) -> ShardWork | None:
        return self._works.get(shard_id)

    def open(self, claim: ShardClaim, now: float) -> ShardWork:
        """A claimed shard."""
        work = self._works[claim.shard_id] = ShardWork(claim, now)
        return work

    def settle(self, work: ShardWork) -> None:
        """The shard is committed, given back, failed or lost."""
        del self._works[work.claim.shard_id]

    def record_batch(self, work: ShardWork, batch: PreparedBatch) -> None:
        """Rows that were prepared."""
        work.record_batch(batch)
        self._work_by_request.update(dict.fromkeys(batch.pending, work))

    def record_completions(self, completions: Iterable[Completion]) -> None:
        """Rows that the engine answered."""
        for completion in completions:
            self._work_by_request.pop(completion.request_id).record_completion(completion)

    def works_of(self, request_ids: Iterable[int]) -> list[ShardWork]:
        """The shards to which these requests belong, each once."""
        works = (self._work_by_request.get(request_id) for request_id in request_ids)
        return list({id(work): work for work in works if work is not None}.values())

    def drop_pending(self, work: ShardWork) -> set[int]:
        """Forgets the shard's rows without a result; their request ids."""
        request_ids = set(work.pending)
        for request_id in request_ids:
            del self._work_by_request[request_id]
        work.pending.clear()
        return request_ids

    def take_uncommitted(
        self, work: ShardWork, now: float, counters: EngineCounters, busy_s: float
    ) -> Uncommitted:
        """The shard's new rows; what the engine counted since the last commit of any shard goes with them."""
        taken = work.take_uncommitted(now)
        new, self._counted = counters.minus(self._counted), counters
        stats = taken.stats
        stats.num_preemptions += new.num_preemptions
        stats.scheduled_tokens_while_waiting += new.scheduled_tokens_while_waiting
        stats.budget_tokens_while_waiting += new.budget_tokens_while_waiting
        stats.kv_waste_sum += new.kv_waste_sum
        stats.kv_waste_samples += new.kv_waste_samples
        stats.busy_s += busy_s
        self._total.add(taken.counts)
        return taken

    def take_back(self, work: ShardWork, part: PartFile | None, stripped: ShardCounts) -> None:
        """The shard's error rows were taken out of its part, to be computed again."""
        work.begin_again(replace(work.claim, part=part, strip_errors=False))
        self._total.add(stripped)

    def counts(self) -> ShardCounts:
        """All finished rows, committed or not."""
        counts = ShardCounts()
        counts.add(self._total)
        for work in self._works.values():
            counts.add(work.uncommitted_counts)
        return counts

    def progress(self, tokens_per_s: float | None = None) -> Progress:
        """How far the job is; tokens_per_s as the engine generates them."""
        counts = self.counts()
        return Progress(
            rows_done=counts.rows,
            rows_total=self._num_rows,
            tokens_per_s=tokens_per_s,
            rows_failed=counts.failed,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
        )


class RunProgress:
    """What the active shards say, and the rate at which the engine generates."""

    def __init__(
        self, display: Display, active: ActiveShards, engine: EngineSupervisor, interval_s: float
    ) -> None:
        self._display = display
        self._active = active
        self._engine = engine
        self._interval_s = interval_s
        self._last_s = 0.0
        self._token_rate = MovingRate()

    def show(self, now: float) -> None:
        """Updates the display if it is time."""
        if now - self._last_s >= self._interval_s:
            self._last_s = now
            self._token_rate.push(now, self._engine.counters.num_output_tokens)
            self._display.update(self._active.progress(self._token_rate.per_s()))

    def show_end(self) -> None:
        """The last figures."""
        self._display.update(self._active.progress())
