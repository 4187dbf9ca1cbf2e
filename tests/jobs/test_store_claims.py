"""Who may work on a shard, and who may still commit it: leases, fences, dead owners, many at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from gristmill.jobs.owner import Owner, current_owner
from gristmill.jobs.records import Signal, offer_for
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.models import attempts, shards
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import ELSEWHERE, OTHER_PLACE, Clock, claim_or_fail, commit_rows, create_job, dead_owner


def test_shards_are_claimed_in_input_order_and_each_once(store: Store, out: Path) -> None:
    job = create_job(store, out, 4, 4, 2)
    claims = [claim_or_fail(store, job) for _ in range(3)]
    assert [claim.range.first_row for claim in claims] == [0, 4, 8]
    assert [claim.fence for claim in claims] == [1, 1, 1]
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None


def test_a_stale_attempt_cannot_commit(
    store: Store, store_url: str, clock: Clock, storage: Storage, out: Path
) -> None:
    job = create_job(store, out, 4)
    stale = claim_or_fail(store, job, ELSEWHERE)
    clock.now += 61
    with open_store(store_url, clock) as other:
        newer = claim_or_fail(other, job, OTHER_PLACE)
        assert newer.fence == stale.fence + 1
        assert commit_rows(store, storage, stale, 0, 1, 2, 3, complete=True) is None
        assert store.jobs.status(job.job_id).not_run == 4
        assert commit_rows(other, storage, newer, 0, 1, 2, 3, complete=True) is not None
    assert commit_rows(store, storage, stale, 0, 1, 2, 3, complete=True) is None
    assert store.jobs.status(job.job_id).completed == 4


@pytest.mark.parametrize(
    ("build_owner", "is_fenced"),
    [
        (dead_owner, True),
        (lambda: replace(current_owner(), start_time=current_owner().start_time - 1), True),
        (current_owner, False),
    ],
    ids=["dead", "of a reused pid", "alive"],
)
def test_an_owner_of_this_host_is_fenced_at_once_if_it_is_dead(
    store: Store, out: Path, build_owner: Callable[[], Owner], is_fenced: bool
) -> None:
    job = create_job(store, out, 4)
    first = claim_or_fail(store, job, build_owner())
    second = store.claims.next(offer_for(job), current_owner())
    if second is None:
        assert not is_fenced and store.shards.release(first)
        return
    assert is_fenced and (second.shard_id, second.fence) == (first.shard_id, first.fence + 1)
    assert not store.shards.release(first)


def test_an_owner_on_another_host_keeps_its_shard_until_the_lease_runs_out(
    store: Store, clock: Clock, out: Path
) -> None:
    job = create_job(store, out, 4)
    claim_or_fail(store, job, ELSEWHERE)
    clock.now += 59
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None
    clock.now += 2
    assert claim_or_fail(store, job, OTHER_PLACE).fence == 2


def test_a_heartbeat_renews_the_lease_and_reports_rows(store: Store, clock: Clock, out: Path) -> None:
    job = create_job(store, out, 4)
    claim = claim_or_fail(store, job)
    for _ in range(5):
        clock.now += 40
        assert store.shards.heartbeat([claim], {claim.shard_id: 3}) == (
            {job.job_id: Signal.CONTINUE},
            frozenset(),
        )
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None
    assert store.jobs.status(job.job_id).rows_done == 3
    clock.now += 3600
    lost = store.shards.heartbeat([claim], {}).lost_shard_ids
    assert lost == frozenset(), "nobody took the shard in the pause"


def test_every_attempt_leaves_a_row_and_the_shard_keeps_its_start(
    store: Store, clock: Clock, storage: Storage, out: Path
) -> None:
    job = create_job(store, out, 4)
    started = clock.now
    claim_or_fail(store, job)
    clock.now += 61
    second = claim_or_fail(store, job)
    commit_rows(store, storage, second, 0, 1, requeue=True)
    third = claim_or_fail(store, job)
    commit_rows(store, storage, third, 2, 3, complete=True)
    with store.database.read() as (connection, _):
        columns = attempts.c.fence, attempts.c.outcome, attempts.c.rows_committed
        rows = connection.execute(select(*columns).order_by(attempts.c.id)).all()
        assert connection.scalar(select(shards.c.started_at)) == started
    assert store.jobs.load(job.job_id).started_at == started
    assert [tuple(row) for row in rows] == [(1, "lost", 0), (2, "requeued", 2), (3, "done", 2)]


def test_engine_deaths_are_counted_per_shard(store: Store, out: Path) -> None:
    job = create_job(store, out, 4)
    claim = claim_or_fail(store, job)
    assert [store.shards.record_crash(claim), store.shards.record_crash(claim)] == [1, 2]
    assert store.shards.release(claim)
    assert not store.shards.release(claim)
    assert store.shards.record_crash(claim) == 2
    again = claim_or_fail(store, job)
    assert (again.fence, again.crash_count) == (2, 2)
