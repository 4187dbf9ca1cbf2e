"""The end of a job: the invariant counted from the parts, one manifest of the same bytes, crashes between."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import jobs.finalize
from jobs.errors import OutputError
from jobs.finalize import finalize_job
from jobs.owner import current_owner
from jobs.states import JobState
from jobs.storage import LocalStorage
from jobs.store import Store
from tests.jobs.cases import (
    ELSEWHERE,
    OTHER_PLACE,
    Clock,
    claim_or_fail,
    commit_rows,
    create_job,
    dead_owner,
    read_rows,
    run_all,
)


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_a_finished_job_gets_its_manifest(
    store: Store, storage: LocalStorage, out: Path, output_format: str
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
    store: Store, storage: LocalStorage, clock: Clock, out: Path
) -> None:
    job = create_job(store, out, 10, owner=ELSEWHERE)
    clock.now += 4
    run_all(store, storage, job)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    clock.now += 30
    store.touch_job(job.job_id, ELSEWHERE)
    store.release_job(job.job_id, ELSEWHERE)
    status = store.status(job.job_id)
    figures = json.loads(storage.read("_manifest.json"))["job"]
    assert figures == {name: getattr(status, name) for name in figures}
    assert (figures["elapsed_s"], figures["rows_per_s"], status.eta_s) == (4, 2.5, 0)


def test_a_job_with_work_left_is_not_finalized(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 4)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.IN_PROGRESS
    claim_or_fail(store, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.IN_PROGRESS
    assert storage.names() == []


def test_an_input_without_rows_gives_an_empty_part(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 0)
    run_all(store, storage, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert pq.read_table(out).num_rows == 0


def test_a_failed_shard_fails_the_job_and_the_rest_is_kept(
    store: Store, storage: LocalStorage, out: Path
) -> None:
    job = create_job(store, out, 4, 4)
    store.fail_shard(claim_or_fail(store, job), "the engine died 3 times in shard 0")
    run_all(store, storage, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.FAILED
    assert store.load_job(job.job_id).message == "the engine died 3 times in shard 0"
    assert storage.names() == ["part-00001.parquet"]
    store.resume_job(job.job_id)
    run_all(store, storage, job)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_rows(out) == list(range(8))


def test_finalizing_redoes_what_was_not_published(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 4)
    commit_rows(store, storage, claim_or_fail(store, job), *range(4), complete=True, publish=False)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED
    assert read_rows(out) == [0, 1, 2, 3]


def test_finalizing_twice_changes_nothing(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 4)
    run_all(store, storage, job)
    finalize_job(store, storage, job.job_id, ELSEWHERE)
    before = (out / "_manifest.json").stat()
    assert finalize_job(store, storage, job.job_id, OTHER_PLACE) == JobState.COMPLETED
    assert (out / "_manifest.json").stat() == before


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


STEPS = [
    (jobs.finalize, "redo_publications"),
    (jobs.finalize, "_write_manifest"),
    (jobs.finalize, "sweep_attempts"),
    (Store, "complete_job"),
    (LocalStorage, "put"),
]


def kill_at(patch: pytest.MonkeyPatch, target: object, name: str, when: str) -> None:
    plain = getattr(target, name)

    def killed(*args: object) -> None:
        if when == "after":
            plain(*args)
        raise Killed

    patch.setattr(target, name, killed)


@pytest.mark.parametrize(("target", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_writer_of_the_manifest_writes_the_same_bytes(
    store: Store, storage: LocalStorage, clock: Clock, out: Path, target: object, name: str, when: str
) -> None:
    job = create_job(store, out, 12, 8, owner=ELSEWHERE)
    clock.now += 3
    run_all(store, storage, job)
    written = set()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, target, name, when)
            if (name, when) == ("complete_job", "after") and written:
                break
            with pytest.raises(Killed):
                finalize_job(store, storage, job.job_id, dead_owner())
        clock.now += 5
        store.touch_job(job.job_id, ELSEWHERE)
        if storage.size("_manifest.json"):
            written.add(storage.read("_manifest.json"))
    assert finalize_job(store, storage, job.job_id, current_owner()) == JobState.COMPLETED
    assert written <= {storage.read("_manifest.json")}
    assert storage.names() == ["_manifest.json", "part-00000.parquet", "part-00001.parquet"]
    assert read_rows(out) == list(range(20))


def test_a_part_that_was_tampered_with_stops_the_end(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 4)
    run_all(store, storage, job)
    path = out / "part-00000.parquet"
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(OutputError, match=r"part-00000.parquet is missing"):
        finalize_job(store, storage, job.job_id, ELSEWHERE)
    assert store.load_job(job.job_id).state == JobState.FINALIZING
    path.write_bytes(data)
    assert finalize_job(store, storage, job.job_id, ELSEWHERE) == JobState.COMPLETED


def test_the_invariant_is_counted_from_the_parts(store: Store, storage: LocalStorage, out: Path) -> None:
    job = create_job(store, out, 4, output_format="jsonl")
    run_all(store, storage, job, "jsonl")
    path = out / "part-00000.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"error_message": null', b'"error_message": fake', 1))
    with pytest.raises(OutputError, match="holds 4 rows and 1 errors, but 4 and 0 were committed"):
        finalize_job(store, storage, job.job_id, ELSEWHERE)
