"""Random histories of claims, pauses, commits, cancels and resumes, against a model of what must count."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from jobs.finalize import finalize_job
from jobs.parts import load_done_rows
from jobs.publishing import redo_publications
from jobs.records import PartFile, ShardClaim, Signal
from jobs.states import JobState
from jobs.storage import open_storage
from jobs.store import open_store
from tests.jobs.cases import ELSEWHERE, OTHER_PLACE, Clock, commit_rows, create_job, read_rows

SHARD_ROWS = (3, 2, 0)
FIRST_ROWS = (0, 3, 5)


@dataclass
class ShardModel:
    """What one shard must be: its state, its newest fence, when its lease ends, and which rows count."""

    state: str = "queued"
    fence: int = 0
    lease_until: float = 0.0
    rows: set[int] = field(default_factory=set)


class StoreMachine(RuleBasedStateMachine):
    """Two owners on other hosts share a job; each may pause, crash after a commit, or come back late."""

    claims: Bundle[ShardClaim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.store = open_store("sqlite://", self.clock)
        self.storage = open_storage(str(self.folder / "out"))
        self.job = create_job(self.store, self.folder / "out", *SHARD_ROWS)
        self.state = "in_progress"
        self.model = [ShardModel() for _ in SHARD_ROWS]
        self.paused: list[tuple[int, PartFile]] = []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def is_current(self, claim: ShardClaim) -> bool:
        shard = self.model[claim.range.shard_index]
        return shard.state == "running" and shard.fence == claim.fence

    @rule(target=claims, owner=st.sampled_from([ELSEWHERE, OTHER_PLACE]))
    def claim(self, owner):  # type: ignore[no-untyped-def]
        claim = self.store.claim_shard(self.job.job_id, owner)
        free = [
            index
            for index, shard in enumerate(self.model)
            if shard.state == "queued" or (shard.state == "running" and shard.lease_until < self.clock.now)
        ]
        if self.state != "in_progress" or not free:
            assert claim is None
            return multiple()
        assert claim is not None and claim.range.shard_index == free[0]
        shard = self.model[free[0]]
        shard.state, shard.fence, shard.lease_until = "running", shard.fence + 1, self.clock.now + 60
        assert claim.fence == shard.fence
        assert load_done_rows(self.storage, claim.part) == shard.rows
        return claim

    @rule(seconds=st.sampled_from([20, 61]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(claim=claims)
    def beat(self, claim: ShardClaim) -> None:
        signal = self.store.heartbeat([claim], {}).signal
        if self.is_current(claim):
            self.model[claim.range.shard_index].lease_until = self.clock.now + 60
        if self.state != "in_progress":
            assert signal == Signal.CANCEL
        else:
            assert signal == (Signal.CONTINUE if self.is_current(claim) else Signal.LOST)

    @rule(target=claims, claim=consumes(claims), data=st.data(), publish=st.booleans())
    def commit(self, claim, data, publish):  # type: ignore[no-untyped-def]
        shard = self.model[claim.range.shard_index]
        current = self.is_current(claim)
        first = FIRST_ROWS[claim.range.shard_index]
        wanted = set(range(first, first + claim.range.num_rows))
        left = sorted(wanted - (shard.rows if current else set()))
        rows = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        how = data.draw(st.sampled_from(["checkpoint", "requeue", "complete"]))
        if how == "complete":
            rows = left
        if not current:
            claim = replace(claim, part=None)
        flags = {} if how == "checkpoint" else {how: True}
        newer = commit_rows(self.store, self.storage, claim, *rows, publish=publish, **flags)
        assert (newer is not None) == current
        if newer is None:
            return multiple()
        shard.rows |= set(rows)
        if newer.part is not None and not publish:
            self.paused.append((newer.shard_id, newer.part))
        shard.lease_until = self.clock.now + 60
        shard.state = {"checkpoint": "running", "requeue": "queued", "complete": "done"}[how]
        return newer if how == "checkpoint" else multiple()

    @rule(claim=consumes(claims))
    def fail(self, claim: ShardClaim) -> None:
        current = self.is_current(claim)
        assert self.store.fail_shard(claim, "no luck") == current
        if current:
            self.model[claim.range.shard_index].state = "failed"

    @rule()
    def cancel(self) -> None:
        self.store.request_cancel(self.job.job_id)
        if self.state == "in_progress":
            self.state = "cancelling"
        cancelled = self.store.finish_cancel(self.job.job_id)
        if self.state == "cancelling":
            for shard in self.model:
                lapsed = shard.state == "running" and shard.lease_until < self.clock.now
                if shard.state == "queued" or lapsed:
                    shard.state = "cancelled"
            if all(shard.state != "running" for shard in self.model):
                self.state = "cancelled"
        assert cancelled == (self.state == "cancelled")

    @rule()
    def resume(self) -> None:
        self.store.resume_job(self.job.job_id)
        if self.state in ("cancelled", "failed"):
            self.state = "in_progress"
            for shard in self.model:
                if shard.state in ("cancelled", "failed"):
                    shard.state = "queued"

    @rule(owner=st.sampled_from([ELSEWHERE, OTHER_PLACE]))
    def finalize(self, owner) -> None:  # type: ignore[no-untyped-def]
        state = finalize_job(self.store, self.storage, self.job.job_id, owner)
        if self.state == "in_progress" and all(shard.state in ("done", "failed") for shard in self.model):
            done = all(shard.state == "done" for shard in self.model)
            self.state = "completed" if done else "failed"
        assert state == JobState(self.state)

    @rule()
    def wake_paused_publishers(self) -> None:
        for shard_id, part in self.paused:
            self.storage.rename(part.attempt, part.path)
            self.store.mark_published(shard_id, part)

    @rule()
    def redo(self) -> None:
        redo_publications(self.storage, self.store, self.job.job_id)
        assert read_rows(self.folder / "out") == sorted(set().union(*(shard.rows for shard in self.model)))

    @invariant()
    def only_committed_rows_are_seen_and_each_once(self) -> None:
        seen = read_rows(self.folder / "out")
        assert seen == sorted(set(seen))
        assert set(seen) <= set().union(*(shard.rows for shard in self.model))

    @invariant()
    def rows_are_completions_and_errors_and_not_run(self) -> None:
        status = self.store.status(self.job.job_id)
        counted = sum(len(shard.rows) for shard in self.model)
        assert status.completed + status.failed == counted == status.rows - status.not_run
        assert status.state == self.state
        if self.state == "completed":
            assert self.storage.size("_manifest.json") and status.not_run == 0


# No shrinking: a failing history of 25 steps is short enough, and shrinking it takes minutes.
SHORT = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class TestShortHistories(StoreMachine.TestCase):
    """Runs in `make test`."""

    settings = SHORT


@pytest.mark.long
class TestLongHistories(StoreMachine.TestCase):
    """Runs in `make test-long`."""

    settings = settings(SHORT, max_examples=200, stateful_step_count=50)
