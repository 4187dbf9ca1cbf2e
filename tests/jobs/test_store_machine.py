"""Random histories of two jobs in the queue, from claims to retries, against a model of what must count."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.parts import strip_errors, write_attempt
from gristmill.jobs.output.publishing import MANIFEST_NAME, publish_part, redo_publications
from gristmill.jobs.owner import Owner
from gristmill.jobs.records import PartFile, ShardClaim, Signal
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    OTHER_PLACE,
    SCHEMA,
    SOURCES,
    Clock,
    build_results,
    count_results,
    load_done_rows,
    read_rows,
    submit_job,
)
from tests.jobs.store_model import JobModel, ShardModel

ENDED = ("completed", "failed", "cancelled", "expired")
OWNERS = st.sampled_from([ELSEWHERE, OTHER_PLACE])
WHICH = st.sampled_from([0, 1])


class StoreMachine(RuleBasedStateMachine):
    """Two owners on other hosts share two jobs; each may pause, crash after a commit, or come back late."""

    claims: Bundle[ShardClaim] = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock()
        self.store: Store = open_store("sqlite://", self.clock)
        self.models = [self.begin("a", 3, 2, 0), self.begin("b", 2, 2, deadline="100s")]
        self.models[1].deadline_at = self.clock.now + 100 - 1
        self.paused: list[tuple[JobModel, int, PartFile]] = []

    def begin(self, name: str, *shard_rows: int, **spec: str) -> JobModel:
        job = submit_job(self.store, self.folder / name, *shard_rows, **spec)
        self.clock.now += 1  # so that one job is the older one
        shards, first = [], 0
        for rows in shard_rows:
            shards.append(ShardModel(frozenset(range(first, first + rows))))
            first += rows
        return JobModel(job, self.folder / name, open_storage(str(self.folder / name)), shards)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def find(self, claim: ShardClaim) -> tuple[JobModel, ShardModel]:
        job = next(model for model in self.models if model.job.job_id == claim.job_id)
        return job, job.shards[claim.range.shard_index]

    def is_current(self, claim: ShardClaim) -> bool:
        shard = self.find(claim)[1]
        return shard.state == "running" and shard.fence == claim.fence

    def open_jobs(self) -> Iterator[JobModel]:
        """The jobs that have a shard to give away, in the order in which they give."""
        found = [
            job
            for job in self.models
            if job.state == "in_progress" and job.deadline_at > self.clock.now and job.free(self.clock.now)
        ]

        def num_running(job: JobModel) -> int:
            return sum(shard.state == "running" and not shard.is_free(self.clock.now) for shard in job.shards)

        yield from sorted(found, key=num_running)

    @rule(target=claims, owner=OWNERS)
    def claim(self, owner):  # type: ignore[no-untyped-def]
        return self.take(owner) or multiple()

    def take(self, owner: Owner) -> ShardClaim | None:
        job = next(self.open_jobs(), None)
        claim = self.store.claims.next(OFFER, owner)
        assert (claim is not None) == (job is not None)
        if claim is None or job is None:
            return None
        free = job.free(self.clock.now)
        assert (claim.job_id, claim.range.shard_index) == (job.job.job_id, free[0])
        shard = job.shards[free[0]]
        shard.state, shard.fence, shard.lease_until = "running", shard.fence + 1, self.clock.now + 60
        assert (claim.fence, claim.strip_errors) == (shard.fence, shard.strip)
        assert load_done_rows(job.storage, claim.part) == shard.rows
        return claim

    @rule(owner=OWNERS, has_errors=st.sampled_from([True, True, False]))
    def run_all(self, owner, has_errors) -> None:  # type: ignore[no-untyped-def]
        while claim := self.take(owner):
            job, shard = self.find(claim)
            if claim.strip_errors:
                claim = self.strip(claim, job, shard)
            left = sorted(shard.rows_wanted - shard.rows)
            self.write(claim, left, set(left[:1]) if has_errors else set(), "complete", publish=True)
        for which in (0, 1):
            self.end(which, owner)

    @rule(seconds=st.sampled_from([20, 61]))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule(claim=claims)
    def beat(self, claim: ShardClaim) -> None:
        job, shard = self.find(claim)
        beat = self.store.shards.heartbeat([claim], {})
        if self.is_current(claim):
            shard.lease_until = self.clock.now + 60
        signal = Signal.CONTINUE if job.state == "in_progress" else Signal.CANCEL
        lost = frozenset() if self.is_current(claim) else {claim.shard_id}
        assert beat == ({claim.job_id: signal}, lost)

    @rule(target=claims, claim=consumes(claims), data=st.data(), publish=st.booleans())
    def commit(self, claim, data, publish):  # type: ignore[no-untyped-def]
        job, shard = self.find(claim)
        current = self.is_current(claim)
        if not current:
            claim = replace(claim, part=None, strip_errors=False)
        if claim.strip_errors:
            return self.strip(claim, job, shard)
        left = sorted(shard.rows_wanted - (shard.rows if current else set()))
        rows = data.draw(st.lists(st.sampled_from(left), unique=True)) if left else []
        how = data.draw(st.sampled_from(["checkpoint", "requeue", "complete"]))
        if how == "complete":
            rows = left
        bad = set(data.draw(st.lists(st.sampled_from(rows), unique=True))) if rows else set()
        return self.write(claim, rows, bad, how, publish) or multiple()

    def write(
        self, claim: ShardClaim, rows: list[int], bad: set[int], how: str, publish: bool
    ) -> ShardClaim | None:
        """Commits rows, those in `bad` as errors; the claim if it goes on."""
        job, shard = self.find(claim)
        current = self.is_current(claim)
        results = [replace(build_results(9 if row in bad else 0)[0], row_index=row) for row in rows]
        part = write_attempt(job.storage, claim, results, SCHEMA, SOURCES, "parquet")
        flags = {} if how == "checkpoint" else {how: True}
        assert self.store.shards.commit(claim, part, *count_results(results), **flags) == current
        if not current:
            return None
        if publish:
            publish_part(job.storage, self.store.shards, claim.shard_id, part)
        else:
            self.paused.append((job, claim.shard_id, part))
        shard.rows |= set(rows)
        shard.errors |= bad
        shard.lease_until = self.clock.now + 60
        shard.state = {"checkpoint": "running", "requeue": "queued", "complete": "done"}[how]
        return replace(claim, part=part) if how == "checkpoint" else None

    def strip(self, claim: ShardClaim, job: JobModel, shard: ShardModel) -> ShardClaim:
        job.storage.delete(MANIFEST_NAME)
        part, counts, stats = strip_errors(job.storage, claim, SCHEMA, SOURCES, "parquet")
        assert self.store.shards.commit(claim, part, counts, stats, clear_strip=True)
        publish_part(job.storage, self.store.shards, claim.shard_id, part)
        shard.rows -= shard.errors
        shard.errors, shard.strip, shard.lease_until = set(), False, self.clock.now + 60
        return replace(claim, part=part, strip_errors=False)

    @rule(claim=consumes(claims))
    def fail(self, claim: ShardClaim) -> None:
        current = self.is_current(claim)
        assert self.store.shards.fail(claim, "no luck") == current
        if current:
            self.find(claim)[1].state = "failed"

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        job = self.models[which]
        assert self.store.ends.stop(job.job.job_id, JobState.CANCELLED) == (job.state == "in_progress")
        if job.state == "in_progress":
            job.state, job.stopping_as = "cancelling", "cancelled"

    @rule()
    def expire(self) -> None:
        late = [
            job for job in self.models if job.state == "in_progress" and job.deadline_at <= self.clock.now
        ]
        assert self.store.ends.expire() == [job.job.job_id for job in late]
        for job in late:
            job.state, job.stopping_as = "cancelling", "expired"

    @rule()
    def drain(self) -> None:
        ended = set(self.store.ends.drain_stopped())
        for job in self.models:
            if job.state == "cancelling":
                for index in job.free(self.clock.now):
                    job.shards[index].state = "cancelled"
                is_over = all(shard.state != "running" for shard in job.shards)
                job.state = job.stopping_as if is_over else "cancelling"
                assert (job.job.job_id in ended) == is_over

    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        job = self.models[which]
        self.store.ends.resume(job.job.job_id)
        if job.state in ENDED and job.state != "completed":
            job.reopen(self.clock.now, errors=False)

    @rule(which=WHICH)
    def retry(self, which: int) -> None:
        job = self.models[which]
        if job.state in ENDED and job.errors:
            assert self.store.ends.retry_failed(job.job.job_id) == len(job.errors)
            job.reopen(self.clock.now, errors=True)
            return
        with pytest.raises(RefusedError):
            self.store.ends.retry_failed(job.job.job_id)

    @rule(which=WHICH, owner=OWNERS)
    def finalize(self, which, owner) -> None:  # type: ignore[no-untyped-def]
        self.end(which, owner)

    def end(self, which: int, owner: Owner) -> None:
        job = self.models[which]
        is_over = job.state == "in_progress" and all(
            shard.state in ("done", "failed") for shard in job.shards
        )
        assert (job.job.job_id in self.store.finalizing.waiting()) == is_over
        state = finalize_job(self.store, job.storage, job.job.job_id, owner)
        if is_over:
            done = all(shard.state == "done" for shard in job.shards)
            job.state = "completed" if done else "failed"
        assert state == JobState(job.state)

    @rule()
    def wake_paused_publishers(self) -> None:
        for job, shard_id, part in self.paused:
            job.storage.publish(part.attempt, part.path)
            self.store.shards.mark_published(shard_id, part)

    @rule(which=WHICH)
    def redo(self, which: int) -> None:
        job = self.models[which]
        redo_publications(job.storage, self.store.shards, job.job.job_id)
        assert read_rows(job.folder) == sorted(job.rows)

    @invariant()
    def only_committed_rows_are_seen_and_each_once(self) -> None:
        for job in self.models:
            seen = read_rows(job.folder)
            assert seen == sorted(set(seen))
            assert set(seen) <= job.rows

    @invariant()
    def rows_are_completions_and_errors_and_not_run(self) -> None:
        for job in self.models:
            status = self.store.jobs.status(job.job.job_id)
            assert (status.completed, status.failed) == (len(job.rows - job.errors), len(job.errors))
            assert status.completed + status.failed + status.not_run == status.rows
            assert status.errors_by_code == ({"null_value": len(job.errors)} if job.errors else {})
            assert status.state == job.state
            if job.state == "completed":
                assert job.storage.size(MANIFEST_NAME) and status.not_run == 0


# No shrinking: it takes minutes, and a failing history of 30 steps is short enough.
SHORT = settings(
    max_examples=10,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class TestShortHistories(StoreMachine.TestCase):  # type: ignore[misc, valid-type]
    """Runs in `make test`."""

    settings = SHORT


@pytest.mark.long
class TestLongHistories(StoreMachine.TestCase):  # type: ignore[misc, valid-type]
    """Runs in `make test-long`."""

    settings = settings(SHORT, max_examples=200, stateful_step_count=60)
