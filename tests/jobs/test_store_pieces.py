"""Plans in pieces: each piece saved once, the job started by whoever saves the last one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gristmill.jobs.source import Source
from gristmill.jobs.states import JobState
from gristmill.jobs.store.store import Store
from tests.jobs.cases import ELSEWHERE, SOURCES, Clock, build_pieces, start_job, submit_job


def save_pieces(store: Store, job_id: str, number: int) -> bool:
    return store.pieces.save_all(job_id, SOURCES, ["text"], b"schema", "i" * 32, build_pieces(number))


def test_pieces_carry_what_their_planners_need(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    store.plans.claim(job.job_id, ELSEWHERE)
    assert save_pieces(store, job.job_id, 3)
    loaded = store.pieces.load(job.job_id, 1)
    assert loaded is not None
    assert loaded.source == SOURCES[0]
    assert (loaded.piece.byte_offset, loaded.piece.byte_size, loaded.piece.ranges) == (10, 10, None)
    waiting = store.jobs.load(job.job_id)
    assert (waiting.columns, waiting.part_schema, waiting.identity) == (("text",), b"schema", "i" * 32)
    assert store.pieces.load(job.job_id, 3) is None
    assert store.pieces.load("job_x", 0) is None
    assert store.pieces.unplanned(job.job_id) == [0, 1, 2]


def test_the_last_piece_to_be_saved_says_so(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    save_pieces(store, job.job_id, 3)
    assert not store.pieces.save(job.job_id, 2, "[2]")
    assert not store.pieces.save(job.job_id, 0, "[0]")
    assert not store.pieces.save(job.job_id, 0, "[again]")
    assert store.pieces.unplanned(job.job_id) == [1]
    assert store.pieces.save(job.job_id, 1, "[1]")
    assert store.pieces.save(job.job_id, 1, "[again]"), "a doubled message may start the job as well"
    assert [piece.ranges for piece in store.pieces.load_all(job.job_id)] == ["[0]", "[1]", "[2]"]
    assert start_job(store, job, 4)
    assert store.pieces.load_all(job.job_id) == []
    assert not store.pieces.save(job.job_id, 1, "[late]")
    assert store.pieces.load(job.job_id, 1) is None


def test_a_job_in_pieces_is_not_planned_again(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out)
    assert save_pieces(store, job.job_id, 2)
    assert not save_pieces(store, job.job_id, 5)
    clock.now += 1000
    assert store.plans.waiting() == []
    assert store.plans.claim(job.job_id, ELSEWHERE) is None
    assert len(store.pieces.load_all(job.job_id)) == 2


def test_the_pieces_of_a_plan_that_stands_still_are_sent_by_one(
    store: Store, clock: Clock, out: Path
) -> None:
    job = submit_job(store, out)
    save_pieces(store, job.job_id, 3)
    assert store.pieces.waiting() == [], "the planner has just sent them"
    clock.now += 11
    assert store.pieces.waiting() == [(job.job_id, index) for index in range(3)]
    assert store.pieces.waiting() == [], "another worker has just sent them"
    clock.now += 9
    store.pieces.save(job.job_id, 1, "[]")
    clock.now += 9
    assert store.pieces.waiting() == [], "a piece was saved lately"
    clock.now += 2
    assert store.pieces.waiting() == [(job.job_id, 0), (job.job_id, 2)]


def test_a_plan_whose_starter_died_is_started_by_its_last_piece(
    store: Store, clock: Clock, out: Path
) -> None:
    job = submit_job(store, out)
    save_pieces(store, job.job_id, 2)
    for index in range(2):
        store.pieces.save(job.job_id, index, "[]")
    clock.now += 11
    assert store.pieces.waiting() == [(job.job_id, 1)]
    loaded = store.pieces.load(job.job_id, 1)
    assert loaded is not None and loaded.piece.ranges == "[]"


def test_pieces_of_a_stopped_or_resumed_job_are_forgotten(store: Store, clock: Clock, out: Path) -> None:
    job = submit_job(store, out)
    save_pieces(store, job.job_id, 2)
    store.ends.stop(job.job_id, JobState.CANCELLED)
    assert store.pieces.load(job.job_id, 0) is None
    assert not save_pieces(store, job.job_id, 2)
    store.ends.drain_stopped()
    clock.now += 11
    assert store.pieces.waiting() == []
    assert store.ends.resume(job.job_id) == JobState.VALIDATING
    assert store.pieces.load_all(job.job_id) == []
    assert store.plans.waiting() == [job.job_id]


def test_each_piece_names_its_own_source(store: Store, out: Path) -> None:
    job = submit_job(store, out)
    sources = [Source(f"s3://b/{index}.parquet", 5, "etag", "parquet") for index in range(3)]
    pieces = [replace(piece, source_index=index) for index, piece in enumerate(build_pieces(3))]
    store.pieces.save_all(job.job_id, sources, [], b"", "", pieces)
    found = [store.pieces.load(job.job_id, index) for index in range(3)]
    assert [piece.source for piece in found if piece] == sources
