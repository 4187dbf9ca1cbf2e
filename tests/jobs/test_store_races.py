"""Many processes and threads at one database: no shard twice, one winner of every step, no locked database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

from sqlalchemy import select

from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.owner import current_owner
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.states import JobState
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.storage.folder import open_storage
from gristmill.jobs.store.models import attempts
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import (
    ELSEWHERE,
    OFFER,
    SOURCES,
    at_once,
    build_pieces,
    create_job,
    run_queue,
    start_job,
    submit_job,
)

CLAIMING = """
import sys
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import offer_for
from gristmill.jobs.stats import JobStats, ShardCounts
from gristmill.jobs.store.store import open_store
from tests.jobs.cases import OFFER
with open_store(sys.argv[1]) as store:
    store.workers.register(sys.argv[2], current_owner(), [], "1")
    local = offer_for(store.jobs.load(sys.argv[3]))
    while claim := store.claims.next(OFFER, current_owner()) or store.claims.next(local, current_owner()):
        store.shards.heartbeat([claim], {})
        if claim.range.shard_index % 3 == 0 and claim.fence == 1:
            assert store.shards.release(claim)
            continue
        assert store.shards.commit(claim, None, ShardCounts(), JobStats(), complete=True)
        store.workers.beat(sys.argv[2], [], 1, 1)
        print(claim.job_id, claim.range.shard_index)
"""


def test_processes_take_every_shard_of_every_job_once(
    store_url: str, tmp_path: Path, repo_root: Path
) -> None:
    with open_store(store_url) as store:
        job_ids = [submit_job(store, tmp_path / f"{n}", *[0] * 12).job_id for n in range(3)]
        local_id = create_job(store, tmp_path / "local", *[0] * 12).job_id
    command = [sys.executable, "-W", "error", "-c", CLAIMING, store_url]
    children = [
        subprocess.Popen(
            [*command, f"w{number}", local_id], cwd=repo_root, stdout=PIPE, stderr=PIPE, text=True
        )
        for number in range(4)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [errors for _, errors in outputs] == [""] * 4
    done = Counter(line for output, _ in outputs for line in output.splitlines())
    assert done == Counter(f"{job_id} {index}" for job_id in [*job_ids, local_id] for index in range(12))
    with open_store(store_url) as store:
        assert sorted(store.finalizing.waiting()) == sorted(job_ids)
        assert {store.jobs.load(job_id).fingerprint for job_id in job_ids} == {OFFER.fingerprint}
        with store.database.read() as (connection, _):
            outcomes = Counter(connection.scalars(select(attempts.c.outcome)))
    assert outcomes == {"done": 48, "requeued": 16}


def test_one_key_submitted_at_once_is_one_job(store: Store, out: Path) -> None:
    spec = JobSpec(input=["x"], output=str(out), model="null")
    found = at_once(8, lambda _: store.submissions.submit(spec, "key-1"))
    assert len({submitted.job.job_id for submitted in found}) == 1
    assert [submitted.is_new for submitted in found].count(True) == 1


def test_one_of_many_planners_plans_and_one_starts(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    claimed = at_once(6, lambda _: store.plans.claim(job.job_id, current_owner()))
    assert sum(found is not None for found in claimed) == 1
    assert at_once(6, lambda _: start_job(store, job, *[1] * 50)).count(True) == 1
    assert store.jobs.status(job.job_id).shards == {"queued": 50}


def test_the_last_of_many_pieces_is_seen(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    store.pieces.save_all(job.job_id, SOURCES, [], b"", "i", build_pieces(8))
    assert True in at_once(8, lambda index: store.pieces.save(job.job_id, index, "[]"))
    assert store.pieces.unplanned(job.job_id) == []


def test_one_of_two_fingerprints_wins(store: Store, out: Path) -> None:
    job = submit_job(store, out, *[1] * 8)
    offers = [OFFER, OFFER._replace(fingerprint="e" * 32)]
    claims = at_once(8, lambda index: store.claims.next(offers[index % 2], current_owner()))
    fingerprint = store.jobs.load(job.job_id).fingerprint
    won = [offers[index % 2].fingerprint for index, claim in enumerate(claims) if claim is not None]
    assert won and set(won) == {fingerprint}


def test_a_stop_among_claims_ends_with_nothing_running(store: Store, out: Path) -> None:
    job = submit_job(store, out, *[0] * 30)

    def work(index: int) -> None:
        if index == 0:
            store.ends.stop(job.job_id, JobState.CANCELLED)
            store.ends.drain_stopped()
            return
        while claim := store.claims.next(OFFER, current_owner()):
            complete = claim.range.shard_index % 2 == 0
            store.shards.commit(
                claim, None, ShardCounts(), JobStats(), complete=complete, requeue=not complete
            )

    at_once(6, work)
    store.ends.drain_stopped()
    status = store.jobs.status(job.job_id)
    assert status.state == "cancelled"
    assert set(status.shards) <= {"done", "cancelled"} and sum(status.shards.values()) == 30


def test_drains_and_resumes_at_once_leave_a_job_that_can_end(store: Store, out: Path) -> None:
    job = submit_job(store, out, *[0] * 20)
    store.ends.stop(job.job_id, JobState.CANCELLED)

    def work(index: int) -> None:
        for _ in range(3):
            if index % 2:
                store.ends.drain_stopped()
            else:
                store.ends.resume(job.job_id)

    at_once(6, work)
    state = store.jobs.load(job.job_id).state
    shards = store.jobs.status(job.job_id).shards
    assert (state, shards) in [
        (JobState.IN_PROGRESS, {"queued": 20}),
        (JobState.CANCELLED, {"cancelled": 20}),
    ]


def test_stops_and_resumes_at_once_each_count_once(store: Store, out: Path) -> None:
    job = submit_job(store, out, 1)
    at_once(4, lambda _: store.ends.stop(job.job_id, JobState.EXPIRED))
    assert sum(len(ended) for ended in at_once(4, lambda _: store.ends.drain_stopped())) == 1
    assert at_once(4, lambda _: store.ends.resume(job.job_id)) == [JobState.IN_PROGRESS] * 4
    assert store.jobs.status(job.job_id).shards == {"queued": 1}


def test_one_of_many_senders_sends_a_notice(store: Store, out: Path) -> None:
    job = submit_job(store, out, on_complete="task")
    store.plans.refuse(job.job_id, "no")
    assert at_once(6, lambda _: store.notices.mark_sent(job.job_id, 1)).count(True) == 1


def test_stats_of_shards_done_at_once_add_up(store: Store, out: Path) -> None:
    job = submit_job(store, out, *[0] * 24)
    stats = JobStats(finish_reasons={"stop": 1})

    def work(_: int) -> None:
        while claim := store.claims.next(OFFER, current_owner()):
            assert store.shards.commit(claim, None, ShardCounts(), stats, complete=True)

    at_once(6, work)
    assert store.jobs.status(job.job_id).finish_reasons == {"stop": 24}
    finalizers = at_once(6, lambda _: store.finalizing.waiting())
    assert finalizers == [[job.job_id]] * 6


def test_five_finalizers_at_once_write_one_manifest(store: Store, place: str) -> None:
    storage = open_storage(place)
    job = submit_job(store, place, *[3] * 8)
    run_queue(store, storage)
    owners = [replace(ELSEWHERE, pid=pid) for pid in range(1, 6)]
    states = at_once(len(owners), lambda index: finalize_job(store, storage, job.job_id, owners[index]))
    assert JobState.COMPLETED in states
    manifest = json.loads(storage.read("_manifest.json"))
    assert manifest["totals"]["rows"] == sum(part["rows"] for part in manifest["parts"]) == 24
    assert len(storage.names()) == 9
