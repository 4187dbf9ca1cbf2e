"""The end of a job: the invariant counted from the parts, one manifest of the same bytes, crashes between."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gristmill.jobs.output.finalize
from gristmill.jobs.errors import OutputError
from gristmill.jobs.output.finalize import finalize_job
from gristmill.jobs.output.formats.base import PartRows
from gristmill.jobs.output.parts import count_part
from gristmill.jobs.owner import current_owner
from gristmill.jobs.records import FinalizeClaim, PartFile
from gristmill.jobs.states import JobState
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.finalizing import Finalizing
from gristmill.jobs.store.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    Clock,
    claim_next,
    claim_or_fail,
    commit_rows,
    create_job,
    dead_owner,
    finish_shard,
    read_rows,
    run_all,
    run_job,
    run_queue,
    submit_job,
)


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_a_finished_job_gets_its_manifest(
    store: Store, storage: Storage, out: Path, output_format: str
) -> None:
    job = create_job(store, out, 12, 8, output_format=output_format, max_tokens=4)
    run_all(store, storage, job, output_format)
    storage.put("_attempts/00001-1-left-over.parquet", b"")
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    parts = [f"part-0000{index}.{output_format}" for index in (0, 1)]
    assert storage.names() == ["_manifest.json", *parts]
    manifest = json.loads(storage.read("_manifest.json"))
    assert [(part["path"], part["rows"]) for part in manifest["parts"]] == [(parts[0], 12), (parts[1], 8)]
    for part in manifest["parts"]:
        data = (out / part["path"]).read_bytes()
        assert (part["bytes"], part["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert manifest["totals"] == {"rows": 20, "completions": 18, "errors": 2, "not_run": 0}
    assert manifest["spec"]["max_tokens"] == 4
    assert manifest["model_fingerprint"] == "f" * 32
    assert manifest["job"]["errors_by_code"] == {"null_value": 2}
    assert manifest["job"]["percentiles"]["queue_wait_s"]["p50"] == pytest.approx(0.5, rel=0.05)


def test_the_manifest_repeats_the_figures_of_the_status(
    store: Store, storage: Storage, clock: Clock, out: Path
) -> None:
    job = create_job(store, out, 10, owner=ELSEWHERE)
    clock.now += 4
    run_all(store, storage, job)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    clock.now += 30
    store.jobs.touch([job.job_id], ELSEWHERE)
    store.jobs.release(job.job_id, ELSEWHERE)
    status = store.jobs.status(job.job_id)
    figures = json.loads(storage.read("_manifest.json"))["job"]
    assert figures == {name: getattr(status, name) for name in figures}
    assert (figures["elapsed_s"], figures["rows_per_s"], status.eta_s) == (4, 2.5, 0)


def test_a_job_with_work_left_is_not_finalized(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 4)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.IN_PROGRESS
    claim_or_fail(store, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.IN_PROGRESS
    assert storage.names() == []


def test_an_input_without_rows_gives_an_empty_part(store: Store, storage: Storage, out: Path) -> None:
    job = run_job(store, storage, out, 0)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert pq.read_table(out).num_rows == 0


def test_a_failed_shard_fails_the_job_and_the_rest_is_kept(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 4, 4)
    bad = claim_or_fail(store, job)
    store.shards.record_crash(bad)
    store.shards.fail(bad, "the engine died 3 times in shard 0")
    run_all(store, storage, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.FAILED
    assert store.jobs.load(job.job_id).message == "the engine died 3 times in shard 0"
    assert storage.names() == ["part-00001.parquet"]
    store.ends.resume(job.job_id)
    again = claim_or_fail(store, job)
    assert (again.range.shard_index, again.crash_count) == (0, 0)
    store.shards.release(again)
    run_all(store, storage, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_rows(out) == list(range(8))


def test_finalizing_redoes_what_was_not_published(store: Store, storage: Storage, out: Path) -> None:
    job = create_job(store, out, 4)
    commit_rows(store, storage, claim_or_fail(store, job), *range(4), complete=True, publish=False)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_rows(out) == [0, 1, 2, 3]


def test_finalizing_twice_changes_nothing(store: Store, storage: Storage, out: Path) -> None:
    job = run_job(store, storage, out, 4)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    before = (out / "_manifest.json").stat()
    assert finalize_job(store, storage, job.job_id, OTHER_PLACE) == JobState.COMPLETED
    assert (out / "_manifest.json").stat() == before


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


# After a step is mostly before the next one; these change something.
KILLS = [
    *(
        ("before", step)
        for step in ("list_attempts", "remove_strays", "_check_parts", "_put_manifest", "complete")
    ),
    *(("before", step) for step in ("storage.delete_all", "storage.sweep", "storage.put_new")),
    *(("after", step) for step in ("storage.delete_all", "storage.put_new", "complete")),
]


def kill_at(patch: pytest.MonkeyPatch, storage: Storage, step: str, when: str) -> None:
    name = step.removeprefix("storage.")
    if step.startswith("storage."):
        target: object = type(storage)
    else:
        target = Finalizing if hasattr(Finalizing, name) else gristmill.jobs.output.finalize
    plain = getattr(target, name)

    def killed(*args: object) -> None:
        if when == "after":
            plain(*args)
        raise Killed

    patch.setattr(target, name, killed)


def read_all(storage: Storage) -> list[int]:
    """row_index of every row in the published parts."""
    names = [name for name in storage.names() if name.startswith("part-")]
    tables = [pq.read_table(pa.BufferReader(storage.read(name))) for name in names]
    return [row for table in tables for row in table.column("row_index").to_pylist()]


@pytest.mark.parametrize(("when", "step"), KILLS)
def test_every_writer_of_the_manifest_writes_the_same_bytes(
    store: Store, clock: Clock, place: str, when: str, step: str
) -> None:
    storage = open_storage(place)
    job = submit_job(store, place, 12, 8)
    clock.now += 3
    run_queue(store, storage)
    storage.put("_attempts/00000-1-left-over.parquet", b"")
    written = set()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, storage, step, when)
            if (step, when) == ("complete", "after") and written:
                break
            with pytest.raises(Killed):
                finalize_job(store, storage, job.job_id, dead_owner())
        clock.now += 5
        store.jobs.touch([job.job_id], ELSEWHERE)
        if storage.size("_manifest.json"):
            written.add(storage.read("_manifest.json"))
    assert finalize_job(store, storage, job.job_id, current_owner()) == JobState.COMPLETED
    assert written <= {storage.read("_manifest.json")}
    assert storage.names() == ["_manifest.json", "part-00000.parquet", "part-00001.parquet"]
    assert read_all(storage) == list(range(20))


def test_a_late_copy_of_an_older_part_is_replaced_at_the_end(store: Store, s3_root: str) -> None:
    storage = open_storage(s3_root)
    job = submit_job(store, s3_root, 4)
    claim = commit_rows(store, storage, claim_next(store), 1, 2)
    assert claim is not None and claim.part is not None
    assert commit_rows(store, storage, claim, 0, 3, complete=True)
    assert storage.publish(claim.part.attempt, claim.part.path), "a publisher that was paused"
    assert read_all(storage) == [1, 2]
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_all(storage) == [0, 1, 2, 3]
    assert not storage.publish(claim.part.attempt, claim.part.path)


def test_a_paused_finalizer_takes_nothing_from_the_run_after_it(
    store: Store, clock: Clock, place: str
) -> None:
    """It wakes when the job has failed, was resumed and has written an attempt that is not yet published."""
    storage = open_storage(place)
    job = submit_job(store, place, 4, 4)
    store.shards.fail(claim_next(store), "no")
    run_queue(store, storage)
    plain = gristmill.jobs.output.finalize.list_attempts  # type: ignore[attr-defined]

    def pause(storage: Storage) -> list[str]:
        patch.undo()
        clock.now += 120
        assert finalize_job(store, storage, job.job_id, OTHER_PLACE) == JobState.FAILED
        store.ends.resume(job.job_id)
        commit_rows(store, storage, claim_next(store), 0, 1, 2, 3, complete=True, publish=False)
        return plain(storage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gristmill.jobs.output.finalize, "list_attempts", pause)
        finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert len(storage.names("_attempts")) == 1
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_all(storage) == list(range(8))


def test_the_claim_is_kept_while_a_part_is_slow(
    store: Store, storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run_job(store, storage, out, 4)
    renewed, slow, plain = [], threading.Event(), store.finalizing.renew

    def renew(claim: FinalizeClaim) -> bool:
        renewed.append(claim)
        if len(renewed) == 4:
            slow.set()
        return plain(claim)

    def count_slowly(storage: Storage, part: PartFile) -> PartRows:
        assert slow.wait(60)
        return count_part(storage, part)

    monkeypatch.setattr(gristmill.jobs.output.finalize, "_RENEW_EVERY_S", 0.01)
    monkeypatch.setattr(gristmill.jobs.output.finalize, "count_part", count_slowly)
    monkeypatch.setattr(store.finalizing, "renew", renew)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED


def test_who_loses_the_claim_stops_there(
    store: Store, storage: Storage, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run_job(store, storage, out, 4)
    monkeypatch.setattr(store.finalizing, "renew", lambda claim: False)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.FINALIZING
    assert storage.size("_manifest.json") is None


def test_a_manifest_from_before_a_retry_makes_room(store: Store, place: str) -> None:
    storage = open_storage(place)
    job = run_job(store, storage, place, 4)
    storage.put("_manifest.json", json.dumps({"job_id": job.job_id, "totals": "earlier"}).encode())
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert json.loads(storage.read("_manifest.json"))["totals"]["rows"] == 4


@pytest.mark.parametrize("content", [b'{"job_id": "job_other"}', b"no JSON", b"[]"])
def test_a_manifest_of_another_job_is_never_replaced(
    store: Store, storage: Storage, out: Path, content: bytes
) -> None:
    job = run_job(store, storage, out, 4)
    storage.put("_manifest.json", content)
    with pytest.raises(OutputError, match="_manifest.json is that of another job.*remove the file"):
        finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert storage.read("_manifest.json") == content
    storage.delete("_manifest.json")
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED


def test_failed_rows_tried_again_end_in_a_new_manifest(store: Store, place: str) -> None:
    storage = open_storage(place)
    job = submit_job(store, place, 10, 10)
    finish_shard(store, storage, claim_next(store), num_errors=3)
    finish_shard(store, storage, claim_next(store), num_errors=0)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert json.loads(storage.read("_manifest.json"))["totals"]["errors"] == 3
    assert store.ends.retry_failed(job.job_id) == 3
    finish_shard(store, storage, claim_next(store), num_errors=1)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    manifest = json.loads(storage.read("_manifest.json"))
    assert manifest["totals"] == {"rows": 20, "completions": 19, "errors": 1, "not_run": 0}
    assert read_all(storage) == list(range(20))


@pytest.mark.parametrize(
    ("is_gone", "said"),
    [
        (True, "part-00000.jsonl is missing"),
        (
            False,
            "holds 4 rows and 1 errors, but 4 and 0 were committed",
        ),  # the invariant, counted from the parts
    ],
)
def test_a_part_that_was_tampered_with_stops_the_end(
    store: Store, storage: Storage, out: Path, is_gone: bool, said: str
) -> None:
    job = create_job(store, out, 4, output_format="jsonl")
    run_all(store, storage, job, "jsonl")
    path = out / "part-00000.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"error_message": null', b'"error_message": fake', 1))
    if is_gone:
        path.unlink()
    with pytest.raises(OutputError, match=said):
        finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.jobs.load(job.job_id).state == JobState.FINALIZING
    path.write_bytes(data)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
