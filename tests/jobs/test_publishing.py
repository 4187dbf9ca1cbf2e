"""What may be written into an output folder, and what is cleared from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.output.publishing import (
    check_output,
    clear_output,
    redo_publications,
    remove_strays,
    sweep_attempts,
)
from gristmill.jobs.records import JobRecord
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.store.store import Store, open_store
from tests.jobs.cases import claim_next, create_job, run_all, run_queue, submit_job, write_rows

SAME, OTHER = "i" * 32, "j" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db") as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, out: Path) -> str:
    """An output in each storage."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_root')}/deep/out"
    return str(out)


@pytest.fixture
def job(store: Store, storage: Storage, out: Path) -> JobRecord:
    """A job that has written its part."""
    created = create_job(store, out, 4)
    run_all(store, storage, created)
    return store.jobs.load(created.job_id)


def test_a_new_folder_is_for_a_new_job_and_nothing_is_left_behind(storage: Storage, tmp_path: Path) -> None:
    for if_exists in ("resume", "fail", "overwrite"):
        assert check_output(storage, None, SAME, if_exists) == "new"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_with_hidden_files_is_fine(storage: Storage, out: Path) -> None:
    out.mkdir(parents=True)
    (out / ".DS_Store").write_text("")
    (out / "_SUCCESS").write_text("")
    assert check_output(storage, None, SAME, "fail") == "new"


def test_the_same_job_goes_on(storage: Storage, job: JobRecord) -> None:
    assert check_output(storage, job, SAME, "resume") == "resume"


def test_a_job_that_committed_nothing_yet_goes_on(store: Store, storage: Storage, out: Path) -> None:
    assert check_output(storage, create_job(store, out, 4), SAME, "resume") == "resume"


def test_a_job_whose_folder_was_removed_starts_anew(storage: Storage, job: JobRecord) -> None:
    clear_output(storage)
    assert check_output(storage, job, SAME, "resume") == "new"


def test_another_jobs_folder_is_refused_unless_overwrite(storage: Storage, job: JobRecord) -> None:
    with pytest.raises(RefusedError, match=rf"{job.job_id}.*--if-exists overwrite"):
        check_output(storage, job, OTHER, "resume")
    with pytest.raises(RefusedError, match="does not know"):
        check_output(storage, None, SAME, "resume")
    assert check_output(storage, job, OTHER, "overwrite") == "new"


def test_fail_refuses_even_the_same_job(storage: Storage, job: JobRecord) -> None:
    with pytest.raises(RefusedError, match="--if-exists fail"):
        check_output(storage, job, SAME, "fail")


@pytest.mark.parametrize("name", ["notes.txt", "part-0-abc.snappy.parquet", "part-00000.csv"])
def test_a_folder_with_foreign_files_is_refused_also_for_overwrite(
    storage: Storage, job: JobRecord, out: Path, name: str
) -> None:
    (out / name).write_text("mine")
    for if_exists in ("resume", "overwrite"):
        with pytest.raises(RefusedError, match=f"not written by gristmill.*{name}"):
            check_output(storage, job, SAME, if_exists)


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match="is a file"):
        check_output(open_storage(str(tmp_path / "file")), None, SAME, "resume")
    with pytest.raises(RefusedError, match="can't be written"):
        check_output(open_storage(str(tmp_path / "file" / "out")), None, SAME, "resume")


def test_every_storage_knows_what_it_may_take_over(store: Store, place: str) -> None:
    storage = open_storage(place)
    assert check_output(storage, None, SAME, "fail") == "new"
    job = submit_job(store, place, 4)
    run_queue(store, storage)
    job = store.jobs.load(job.job_id)
    assert check_output(storage, job, job.identity, "resume") == "resume"
    with pytest.raises(RefusedError, match=f"{place} holds the output of job {job.job_id}"):
        check_output(storage, job, OTHER, "resume")
    with pytest.raises(RefusedError, match=f"the input {place}/part-00000.parquet lies in the output"):
        check_output(storage, job, OTHER, "overwrite", [f"{place}2/x", f"{place}/part-00000.parquet"])
    storage.put("notes.txt", b"mine")
    with pytest.raises(RefusedError, match="not written by gristmill.*notes.txt"):
        check_output(storage, job, OTHER, "overwrite")
    clear_output(storage)
    assert storage.names() == ["notes.txt"]


def test_a_late_publisher_of_a_cleared_job_brings_nothing_back(store: Store, place: str) -> None:
    storage = open_storage(place)
    submit_job(store, place, 4)
    claim = claim_next(store)
    part = write_rows(storage, claim, 0, 1, 2, 3)
    clear_output(storage)
    assert not storage.publish(part.attempt, part.path)
    assert storage.names() == []


def test_strays_are_left_alone_by_who_lost_the_folder(store: Store, place: str) -> None:
    storage = open_storage(place)
    job = submit_job(store, place, 4)
    storage.put("part-00007.parquet", b"of another job")
    remove_strays(storage, store.shards, job.job_id, lambda: False)
    assert storage.names() == ["part-00007.parquet"]
    remove_strays(storage, store.shards, job.job_id, lambda: True)
    assert storage.names() == []


def test_a_folder_that_nobody_can_write_is_refused() -> None:
    with pytest.raises(RefusedError, match="can't be written"):
        check_output(open_storage("/proc/gristmill"), None, SAME, "resume")


def test_an_input_in_the_output_folder_is_refused(storage: Storage, out: Path) -> None:
    with pytest.raises(RefusedError, match="lies in the output folder"):
        check_output(storage, None, SAME, "overwrite", [str(out / "part-00000.parquet")])


def test_clearing_takes_our_files_only(storage: Storage, job: JobRecord, out: Path) -> None:
    storage.put("_manifest.json", b"{}")
    storage.put("_attempts/00001-1-abc.parquet", b"")
    (out / "_notes").write_text("mine")
    (out / "notes.txt").write_text("mine")
    clear_output(storage)
    assert storage.names() == ["_notes", "notes.txt"]


def test_parts_that_an_earlier_job_left_are_removed_before_the_new_one_goes_on(
    store: Store, storage: Storage, out: Path
) -> None:
    run_all(store, storage, create_job(store, out, 2, 2))
    storage.put("_manifest.json", b"{}")
    newer = create_job(store, out, 4)
    assert redo_publications(storage, store.shards, newer.job_id) == 0
    assert storage.names() == ["_attempts"]
    run_all(store, storage, newer)
    assert redo_publications(storage, store.shards, newer.job_id) == 0
    assert storage.names() == ["_attempts", "part-00000.parquet"]


def test_a_sweep_takes_attempts_and_half_files(storage: Storage, job: JobRecord, out: Path) -> None:
    storage.put("_attempts/00001-1-abc.parquet", b"")
    (out / "_attempts" / ".00001-1-def.parquet.1234.tmp").write_bytes(b"half")
    (out / "._manifest.json.1234.tmp").write_bytes(b"half")
    sweep_attempts(storage)
    sweep_attempts(storage)
    assert storage.names() == ["part-00000.parquet"]


def test_an_identity_is_all_that_makes_a_job_the_same(storage: Storage, job: JobRecord) -> None:
    assert check_output(storage, replace(job, identity=OTHER), OTHER, "resume") == "resume"
