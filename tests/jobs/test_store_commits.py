"""What a commit does, also one whose reply is lost, one that is partial, and one that nobody published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection

from gristmill.jobs.errors import StoreError
from gristmill.jobs.output.publishing import publish_part, redo_publications
from gristmill.jobs.records import offer_for
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.database import Database
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    OTHER_PLACE,
    Clock,
    build_results,
    claim_or_fail,
    commit_rows,
    count_results,
    create_job,
    load_done_rows,
    read_rows,
    write_rows,
)


def test_a_checkpoint_keeps_the_claim_and_makes_the_part_longer(
    store: Store, storage: Storage, out: Path
) -> None:
    job = create_job(store, out, 6)
    claim = claim_or_fail(store, job)
    claim = commit_rows(store, storage, claim, 4, 1) or claim
    assert read_rows(out) == [1, 4]
    claim = commit_rows(store, storage, claim, 5, 0) or claim
    assert read_rows(out) == [0, 1, 4, 5]
    assert store.jobs.status(job.job_id).shards == {"running": 1}
    commit_rows(store, storage, claim, 3, 2, complete=True)
    assert read_rows(out) == [0, 1, 2, 3, 4, 5]
    assert [path.name for path in out.glob("part-*")] == ["part-00000.parquet"]


def test_counts_and_stats_add_up_over_commits_and_the_last_one_ends_the_shard(
    store: Store, storage: Storage, out: Path
) -> None:
    job = create_job(store, out, 20)
    claim = claim_or_fail(store, job)
    claim = commit_rows(store, storage, claim, *range(10)) or claim
    commit_rows(store, storage, claim, *range(10, 20), complete=True)
    status = store.jobs.status(job.job_id)
    assert (status.completed, status.failed, status.not_run, status.prompt_tokens) == (18, 2, 0, 90)
    assert (status.errors_by_code, status.shards) == ({"null_value": 2}, {"done": 1})
    assert status.percentiles["queue_wait_s"]["p50"] == pytest.approx(0.5, rel=0.05)
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None


def test_a_stop_before_the_first_row_commits_nothing_and_requeues(store: Store, out: Path) -> None:
    job = create_job(store, out, 6)
    claim = claim_or_fail(store, job)
    assert store.shards.commit(claim, None, ShardCounts(), JobStats(), requeue=True)
    assert store.jobs.status(job.job_id).shards == {"queued": 1}


def test_counts_must_be_those_of_the_part_and_a_done_shard_has_all_rows(
    store: Store, storage: Storage, out: Path
) -> None:
    claim = claim_or_fail(store, create_job(store, out, 6))
    with pytest.raises(AssertionError, match="not done with 2"):
        commit_rows(store, storage, claim, 0, 1, complete=True)
    part = write_rows(storage, claim, 0, 1)
    with pytest.raises(AssertionError, match="1 rows counted, 2 in the part"):
        store.shards.commit(claim, part, ShardCounts(completed=1), JobStats())


def test_a_failed_shard_keeps_what_it_committed(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 6)
    claim = commit_rows(store, storage, claim_or_fail(store, job), 0, 1)
    assert claim is not None
    assert store.shards.fail(claim, "the engine died 3 times")
    assert store.shards.failure(job.job_id) == "the engine died 3 times"
    assert store.jobs.status(job.job_id).completed == 2
    assert not store.shards.fail(claim, "again")


class LostReplies:
    """Transactions that commit, and then lose the connection before the reply, `times` times."""

    def __init__(self, database: Database, times: int, commits: bool) -> None:
        self._write = database.write
        self.left = times
        self.commits = commits

    @contextmanager
    def __call__(self) -> Iterator[tuple[Connection, float]]:
        lose, self.left = self.left > 0, self.left - 1
        with self._write() as opened:
            yield opened
            if lose and not self.commits:
                raise StoreError("the connection was cut before COMMIT")
        if lose:
            raise StoreError("the reply to COMMIT was lost")


@pytest.mark.parametrize("commits", [True, False])
def test_a_commit_whose_reply_is_lost_counts_once(
    store: Store, storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    job = create_job(store, out, 4)
    claim = claim_or_fail(store, job)
    part = write_rows(storage, claim, 0, 1, 2, 3)
    monkeypatch.setattr(store.database, "write", LostReplies(store.database, 1, commits))
    assert store.shards.commit(claim, part, *count_results(build_results(0, 1, 2, 3)), complete=True)
    status = store.jobs.status(job.job_id)
    assert (status.completed, status.shards) == (4, {"done": 1})


def test_a_database_that_stays_away_is_an_error(
    store: Store, storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claim_or_fail(store, create_job(store, out, 4))
    part = write_rows(storage, claim, 0, 1, 2, 3)
    monkeypatch.setattr(store.database, "write", LostReplies(store.database, 99, False))
    with pytest.raises(StoreError, match="cut before COMMIT"):
        store.shards.commit(claim, part, *count_results(build_results(0, 1, 2, 3)), complete=True)


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_crash_between_commit_and_the_note_of_the_publication_is_redone(
    store: Store, storage: Storage, out: Path, is_renamed: bool
) -> None:
    job = create_job(store, out, 4)
    claim = commit_rows(store, storage, claim_or_fail(store, job), 0, 1, 2, 3, complete=True, publish=False)
    assert claim is not None and claim.part is not None
    if is_renamed:
        storage.publish(claim.part.attempt, claim.part.path)
    assert read_rows(out) == ([0, 1, 2, 3] if is_renamed else [])
    assert [redo_publications(storage, store.shards, job.job_id) for _ in range(2)] == [1, 0]
    assert read_rows(out) == [0, 1, 2, 3]


@pytest.mark.parametrize("publish", [True, False])
def test_a_stopped_shard_goes_on_where_it_was_whether_its_part_was_published(
    store: Store, storage: Storage, out: Path, publish: bool
) -> None:
    job = create_job(store, out, 4)
    commit_rows(store, storage, claim_or_fail(store, job), 1, 2, requeue=True, publish=publish)
    again = claim_or_fail(store, job, OTHER_PLACE)
    assert load_done_rows(storage, again.part) == {1, 2}
    commit_rows(store, storage, again, 0, 3, complete=True)
    assert read_rows(out) == [0, 1, 2, 3]
    assert store.jobs.status(job.job_id).completed == 4


def test_a_stale_publisher_does_no_harm(store: Store, storage: Storage, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 4)
    paused = commit_rows(store, storage, claim_or_fail(store, job), 1, 2, publish=False)
    assert paused is not None and paused.part is not None
    clock.now += 61
    newer = claim_or_fail(store, job, OTHER_PLACE)
    commit_rows(store, storage, newer, 0, 3, complete=True, publish=False)
    storage.publish(paused.part.attempt, paused.part.path)
    store.shards.mark_published(paused.shard_id, paused.part)
    assert [part.part.rows for part in store.shards.unpublished_parts(job.job_id)] == [4]
    redo_publications(storage, store.shards, job.job_id)
    storage.publish(paused.part.attempt, paused.part.path)
    store.shards.mark_published(paused.shard_id, paused.part)
    assert read_rows(out) == [0, 1, 2, 3]


def test_a_longer_part_waits_to_be_published_again(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 4)
    claim = commit_rows(store, storage, claim_or_fail(store, job), 0, 1)
    assert claim is not None
    assert store.shards.unpublished_parts(job.job_id) == []
    longer = commit_rows(store, storage, claim, 2, publish=False)
    assert longer is not None and longer.part is not None
    assert [entry.part for entry in store.shards.unpublished_parts(job.job_id)] == [longer.part]
    publish_part(storage, store.shards, longer.shard_id, longer.part)
    publish_part(storage, store.shards, longer.shard_id, longer.part)
    assert read_rows(out) == [0, 1, 2]
