"""Who may work on a shard, and who may still commit it: leases, fences, dead owners, many at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

from sqlalchemy import select

from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import Signal, offer_for
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.models import attempts, shards
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    Clock,
    claim_or_fail,
    commit_rows,
    create_job,
    dead_owner,
)


def test_shards_are_claimed_in_input_order_and_each_once(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4, 4, 2)
    claims = [claim_or_fail(store, job) for _ in range(3)]
    assert [claim.range.first_row for claim in claims] == [0, 4, 8]
    assert [claim.fence for claim in claims] == [1, 1, 1]
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None


def test_a_stale_attempt_cannot_commit(
    store: Store, store_url: str, clock: Clock, storage: Storage, tmp_path: Path
) -> None:
    job = create_job(store, tmp_path / "out", 4)
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


def test_a_dead_owner_of_this_host_is_fenced_at_once(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    first = claim_or_fail(store, job, dead_owner())
    second = claim_or_fail(store, job, current_owner())
    assert (second.shard_id, second.fence) == (first.shard_id, first.fence + 1)
    assert not store.shards.release(first)


def test_a_reused_pid_is_not_taken_for_the_dead_owner(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    me = current_owner()
    claim_or_fail(store, job, replace(me, start_time=me.start_time - 1))
    assert store.claims.next(offer_for(job), me) is not None


def test_a_live_owner_of_this_host_keeps_its_shard(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim_or_fail(store, job, current_owner())
    assert store.claims.next(offer_for(job), ELSEWHERE) is None


def test_an_owner_on_another_host_keeps_its_shard_until_the_lease_runs_out(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim_or_fail(store, job, ELSEWHERE)
    clock.now += 59
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None
    clock.now += 2
    assert claim_or_fail(store, job, OTHER_PLACE).fence == 2


def test_a_heartbeat_renews_the_lease_and_reports_rows(store: Store, clock: Clock, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim = claim_or_fail(store, job)
    for _ in range(5):
        clock.now += 40
        assert store.shards.heartbeat([claim], {claim.shard_id: 3}) == (
            {job.job_id: Signal.CONTINUE},
            frozenset(),
        )
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None
    assert store.jobs.status(job.job_id).rows_done == 3


def test_a_heartbeat_says_which_claims_are_lost(store: Store, clock: Clock, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4, 4)
    old, kept = claim_or_fail(store, job), claim_or_fail(store, job)
    clock.now += 50
    store.shards.heartbeat([kept], {})
    clock.now += 20
    claim_or_fail(store, job, OTHER_PLACE)
    beat = store.shards.heartbeat([old, kept], {old.shard_id: 4})
    assert beat == ({job.job_id: Signal.CONTINUE}, frozenset({old.shard_id}))


def test_a_heartbeat_after_a_pause_goes_on_when_nobody_took_the_shard(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim = claim_or_fail(store, job)
    clock.now += 3600
    assert store.shards.heartbeat([claim], {}) == ({job.job_id: Signal.CONTINUE}, frozenset())


def test_a_heartbeat_brings_the_cancellation(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim = claim_or_fail(store, job)
    store.ends.request_cancel(job.job_id)
    assert store.shards.heartbeat([claim], {}).signal_by_job == {job.job_id: Signal.CANCEL}
    assert store.jobs.touch([job.job_id], ELSEWHERE) == {job.job_id: Signal.CANCEL}
    assert store.claims.next(offer_for(job), OTHER_PLACE) is None


def test_every_attempt_leaves_a_row(store: Store, clock: Clock, storage: Storage, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim_or_fail(store, job)
    clock.now += 61
    second = claim_or_fail(store, job)
    commit_rows(store, storage, second, 0, 1, requeue=True)
    third = claim_or_fail(store, job)
    commit_rows(store, storage, third, 2, 3, complete=True)
    with store.database.read() as (connection, _):
        columns = attempts.c.fence, attempts.c.outcome, attempts.c.rows_committed
        rows = connection.execute(select(*columns).order_by(attempts.c.id)).all()
    assert [tuple(row) for row in rows] == [(1, "lost", 0), (2, "requeued", 2), (3, "done", 2)]


def test_a_released_shard_is_claimed_again(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim = claim_or_fail(store, job)
    assert store.shards.release(claim)
    assert not store.shards.release(claim)
    assert claim_or_fail(store, job).fence == 2


def test_engine_deaths_are_counted_per_shard(store: Store, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    claim = claim_or_fail(store, job)
    assert [store.shards.record_crash(claim), store.shards.record_crash(claim)] == [1, 2]
    store.shards.release(claim)
    assert store.shards.record_crash(claim) == 2
    assert claim_or_fail(store, job).crash_count == 2


def test_eight_threads_claim_and_commit_without_a_locked_database(store_url: str, tmp_path: Path) -> None:
    with open_store(store_url) as first:
        job = create_job(first, tmp_path / "out", *[0] * 40)
    claimed: list[int] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with open_store(store_url) as store:
                while claim := store.claims.next(offer_for(job), current_owner()):
                    store.shards.heartbeat([claim], {})
                    assert store.shards.commit(claim, None, ShardCounts(), JobStats(), complete=True)
                    claimed.append(claim.range.shard_index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(claimed) == list(range(40))


CLAIMING = """
import sys
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import offer_for
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.store.store import open_store
with open_store(sys.argv[1]) as store:
    offer = offer_for(store.jobs.load(sys.argv[2]))
    while claim := store.claims.next(offer, current_owner()):
        assert store.shards.commit(claim, None, ShardCounts(), JobStats(), complete=True)
        print(claim.range.shard_index)
"""


def test_processes_claim_each_shard_once(store_url: str, tmp_path: Path, repo_root: Path) -> None:
    with open_store(store_url) as store:
        job = create_job(store, tmp_path / "out", *[0] * 60)
    command = [sys.executable, "-W", "error", "-c", CLAIMING, store_url, job.job_id]
    children = [
        subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [errors for _, errors in outputs] == [""] * 4
    assert sorted(int(line) for output, _ in outputs for line in output.split()) == list(range(60))


def test_a_shard_keeps_its_start_over_attempts(store: Store, clock: Clock, tmp_path: Path) -> None:
    job = create_job(store, tmp_path / "out", 4)
    started = clock.now
    claim_or_fail(store, job)
    clock.now += 100
    claim_or_fail(store, job)
    with store.database.read() as (connection, _):
        assert connection.scalar(select(shards.c.started_at)) == started
    assert store.jobs.load(job.job_id).started_at == started
