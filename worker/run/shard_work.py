"""One claimed shard while this process works on it: rows out, rows that came back, what a commit adds.

Bookkeeping only, used by the runner's loop thread; it reads no clock and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gristmill.engine.request import Completion
from gristmill.jobs.records import ShardClaim
from gristmill.jobs.results import SKIPPED, Result
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.worker.run.prepare import PendingRow, PreparedBatch


@dataclass(slots=True)
class Uncommitted:
    """Finished rows that no commit holds yet, with what they add to the shard's record."""

    results: list[Result] = field(default_factory=list)
    num_chars: int = 0  # of completions and kept text: what they take of our memory
    counts: ShardCounts = field(default_factory=ShardCounts)
    stats: JobStats = field(default_factory=JobStats)


class ShardWork:
    """The state of one shard in progress."""

    def __init__(self, claim: ShardClaim, now: float) -> None:
        self.claim = claim
        self.pending: dict[int, PendingRow] = {}  # by request_id: in the engine, or ready for it
        self.is_read = False  # every row of the range has been prepared
        self.is_closing = False  # its last commit has been handed to the writer
        self.num_done = claim.part.rows if claim.part is not None else 0  # committed or not
        self.last_commit_s = now
        self._uncommitted = Uncommitted()

    @property
    def has_new_rows(self) -> bool:
        return bool(self._uncommitted.results)

    @property
    def num_new_chars(self) -> int:
        return self._uncommitted.num_chars

    @property
    def uncommitted_counts(self) -> ShardCounts:
        return self._uncommitted.counts

    @property
    def is_finished(self) -> bool:
        """Whether every row has its result."""
        return self.is_read and not self.pending

    @property
    def num_left(self) -> int:
        """Rows without a result."""
        return self.claim.range.num_rows - self.num_done

    def begin_again(self, claim: ShardClaim) -> None:
        """The part has changed before any row was prepared: its error rows were taken out."""
        assert not self.pending and not self.has_new_rows
        self.claim = claim
        self.num_done = claim.part.rows if claim.part is not None else 0

    def record_batch(self, batch: PreparedBatch) -> None:
        """Takes over a prepared batch: its requests are pending, its faults are results."""
        self.pending.update(batch.pending)
        for result in batch.results:
            self._record(result)

    def record_completion(self, completion: Completion) -> Result:
        """Turns the engine's answer into the row's result."""
        row = self.pending.pop(completion.request_id)
        failed = completion.error_code is not None
        result = Result(
            row.source_index,
            row.row_index,
            row.custom_id,
            row.kept,
            None if failed else completion.text,
            completion.finish_reason,
            completion.num_prompt_tokens,
            completion.num_output_tokens,
            completion.num_cached_tokens,
            completion.error_code,
            completion.error_message,
        )
        self._record(result)
        if not failed:
            self._uncommitted.stats.record_latency(
                completion.queue_wait_s, completion.time_to_first_token_s, completion.time_per_token_s
            )
        return result

    def take_uncommitted(self, now: float) -> Uncommitted:
        """What the next commit adds, in row order; from now on it counts as committed."""
        taken, self._uncommitted = self._uncommitted, Uncommitted()
        taken.results.sort(key=_row_key)
        self.last_commit_s = now
        return taken

    def _record(self, result: Result) -> None:
        new = self._uncommitted
        new.results.append(result)
        new.num_chars += len(result.completion or "")
        for value in result.kept:
            new.num_chars += len(value) if isinstance(value, str) else 0
        self.num_done += 1
        counts = new.counts
        if result.error_code is not None:
            counts.failed += 1
            new.stats.record_error(result.error_code)
        elif result.finish_reason == SKIPPED:
            counts.skipped += 1
        else:
            counts.completed += 1
            new.stats.record_finish(result.finish_reason or "")
        counts.prompt_tokens += result.prompt_tokens or 0
        counts.completion_tokens += result.completion_tokens or 0
        counts.cached_tokens += result.cached_tokens or 0


def _row_key(result: Result) -> tuple[int, int]:
    return result.source_index, result.row_index
