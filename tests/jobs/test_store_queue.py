"""Which shard of which job a worker gets next, and what it hears about the jobs it works on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import Signal
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage
from gristmill.jobs.store.claims import MAX_LOSSES
from gristmill.jobs.store.models import LEASE_S
from gristmill.jobs.store.plans import MAX_PLANNERS_LOST
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    OTHER_PLACE,
    Clock,
    claim_next,
    commit_rows,
    dead_owner,
    finish_shard,
    submit_job,
)


@pytest.mark.parametrize(
    ("asked", "running", "order"),
    [
        ([(2, {"priority": "low"}), (2, {}), (2, {"priority": "high"})], 0, "ccbbaa"),  # the highest priority
        ([(10, {}), (2, {})], 3, "bba"),  # a long job does not starve a short one
        ([(3, {}), (3, {})], 0, "abab"),  # equal jobs share the workers
        (
            [(1, {"prefix_key": "cold"}), (1, {"prefix_key": "warm"})],
            0,
            "ba",
        ),  # what a worker has in its cache
    ],
)
def test_whose_shard_is_next(
    store: Store,
    clock: Clock,
    tmp_path: Path,
    asked: list[tuple[int, dict[str, str]]],
    running: int,
    order: str,
) -> None:
    names = {}
    for name, (num_shards, fields) in zip("abc", asked, strict=False):
        names[submit_job(store, tmp_path / name, *[1] * num_shards, **fields).job_id] = name
        if name == "a":
            assert {claim_next(store).job_id for _ in range(running)} <= set(names)
        clock.now += 1
    assert "".join(names[claim_next(store, warm=["warm"]).job_id] for _ in order) == order


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"dtypes": ("bfloat16",)}, {"dtypes": ()}], ids=["name", "dtype", "none"]
)
def test_a_model_that_a_job_did_not_ask_for_gets_nothing(
    store: Store, out: Path, change: dict[str, object]
) -> None:
    submit_job(store, out, 4)
    offer = OFFER._replace(**change)
    assert not store.claims.has_work(offer)
    assert store.claims.next(offer, ELSEWHERE) is None


def test_the_first_claim_pins_the_fingerprint(store: Store, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    other = OFFER._replace(fingerprint="e" * 32)
    assert store.claims.has_work(other)
    claim_next(store)
    assert store.jobs.load(job.job_id).fingerprint == OFFER.fingerprint
    assert not store.claims.has_work(other)
    assert store.claims.next(other, OTHER_PLACE) is None
    assert claim_next(store, OTHER_PLACE).range.shard_index == 1


def test_a_job_does_not_start_before_its_time_or_after_its_deadline(
    store: Store, clock: Clock, out: Path
) -> None:
    submit_job(store, out, 4, not_before="60s", deadline="120s")
    assert not store.claims.has_work(OFFER)
    assert store.claims.next(OFFER, ELSEWHERE) is None
    assert store.claims.wanted_models() == []
    clock.now += 60
    assert store.claims.has_work(OFFER)
    assert store.claims.wanted_models() == [("null", "auto")]
    clock.now += 60
    assert store.claims.next(OFFER, ELSEWHERE) is None


def test_the_shard_of_a_dead_worker_comes_before_later_ones(store: Store, clock: Clock, out: Path) -> None:
    submit_job(store, out, 4, 4, 4)
    dead = claim_next(store, dead_owner())
    again = claim_next(store, current_owner())
    assert (again.shard_id, again.fence) == (dead.shard_id, 2)
    lapsed = claim_next(store, ELSEWHERE)
    clock.now += 50
    store.shards.heartbeat([again], {})
    clock.now += 11
    assert claim_next(store, OTHER_PLACE).shard_id == lapsed.shard_id
    assert claim_next(store, OTHER_PLACE).range.shard_index == 2
    assert store.shards.heartbeat([lapsed, again], {}).lost_shard_ids == {lapsed.shard_id}


def test_a_job_whose_last_shard_was_abandoned_has_work(store: Store, clock: Clock, out: Path) -> None:
    submit_job(store, out, 4)
    claim_next(store)
    assert not store.claims.has_work(OFFER)
    clock.now += 61
    assert store.claims.has_work(OFFER)
    assert store.claims.wanted_models() == [("null", "auto")]


def test_a_heartbeat_tells_of_each_job(store: Store, clock: Clock, tmp_path: Path) -> None:
    first, second = (submit_job(store, tmp_path / name, 4) for name in "ab")
    claims = [claim_next(store), claim_next(store)]
    store.ends.request_cancel(second.job_id)
    clock.now += 50
    beat = store.shards.heartbeat(claims, {})
    assert beat.signal_by_job == {first.job_id: Signal.CONTINUE, second.job_id: Signal.CANCEL}
    assert beat.lost_shard_ids == frozenset()
    clock.now += 50
    assert store.claims.next(OFFER, OTHER_PLACE) is None, "the leases were renewed"
    assert store.jobs.touch([first.job_id, second.job_id, "job_gone"], ELSEWHERE) == {
        first.job_id: Signal.CONTINUE,
        second.job_id: Signal.CANCEL,
        "job_gone": Signal.CANCEL,
    }


def test_the_time_of_two_workers_passes_once(store: Store, storage: Storage, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 10, 10)
    clock.now += 500
    claims = [claim_next(store, ELSEWHERE), claim_next(store, OTHER_PLACE)]
    for _ in range(10):
        clock.now += 1
        for claim in claims:
            store.shards.heartbeat([claim], {})
    finish_shard(store, storage, claims[0])
    assert store.jobs.status(job.job_id).elapsed_s == 10


def test_a_pause_without_workers_is_no_active_time(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out, 4, 4)
    claim = claim_next(store)
    clock.now += 10
    store.shards.heartbeat([claim], {})
    store.shards.release(claim)
    clock.now += 10_000
    claim = claim_next(store)
    clock.now += 5
    store.shards.heartbeat([claim], {})
    assert store.jobs.status(job.job_id).elapsed_s == 15


def test_a_shard_that_ends_worker_after_worker_fails_and_the_others_go_on(
    store: Store, out: Path, clock: Clock
) -> None:
    job = submit_job(store, out, 4, 4)
    for _ in range(MAX_LOSSES):
        assert claim_next(store).range.shard_index == 0
        clock.now += LEASE_S + 1
    assert claim_next(store).range.shard_index == 1
    assert store.jobs.status(job.job_id).shards == {"failed": 1, "running": 1}
    assert "workers in a row ended" in (store.shards.failure(job.job_id) or "")


def test_losses_with_finished_rows_between_are_no_reason_to_give_up(
    store: Store, storage: Storage, out: Path, clock: Clock
) -> None:
    job = submit_job(store, out, 3 * MAX_LOSSES)
    for i in range(2 * MAX_LOSSES):
        claim = claim_next(store)
        if i % 5 == 4:
            assert commit_rows(store, storage, claim, i)
        clock.now += LEASE_S + 1
    assert claim_next(store).range.shard_index == 0
    assert store.jobs.status(job.job_id).shards == {"running": 1}


def test_a_job_that_ends_planner_after_planner_fails(store: Store, out: Path, clock: Clock) -> None:
    job = submit_job(store, out)
    for _ in range(MAX_PLANNERS_LOST):
        assert store.plans.claim(job.job_id, ELSEWHERE) is not None
        clock.now += LEASE_S + 1
    assert store.plans.claim(job.job_id, ELSEWHERE) is None
    assert store.jobs.load(job.job_id).state == JobState.FAILED
    assert "damaged input" in (store.jobs.load(job.job_id).message or "")


def test_a_plan_that_was_given_back_is_not_a_lost_one(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    for _ in range(3 * MAX_PLANNERS_LOST):
        assert store.plans.claim(job.job_id, ELSEWHERE) is not None
        store.plans.release(job.job_id, ELSEWHERE)
    assert store.jobs.load(job.job_id).state == JobState.VALIDATING
