"""What may be written into an output folder, and what is cleared from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.errors import RefusedError
from jobs.publishing import check_output, clear_output, redo_publications, sweep_attempts
from jobs.records import JobRecord
from jobs.storage import LocalStorage, open_storage
from jobs.store import Store, open_store
from tests.jobs.cases import create_job, run_all

SAME, OTHER = "i" * 32, "j" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/jobs.db") as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


@pytest.fixture
def job(store: Store, storage: LocalStorage, out: Path) -> JobRecord:
    """A job that has written its part."""
    created = create_job(store, out, 4)
    run_all(store, storage, created)
    return store.load_job(created.job_id)


def test_a_new_folder_is_for_a_new_job_and_nothing_is_left_behind(
    storage: LocalStorage, tmp_path: Path
) -> None:
    for if_exists in ("resume", "fail", "overwrite"):
        assert check_output(storage, None, SAME, if_exists) == "new"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_with_hidden_files_is_fine(storage: LocalStorage, out: Path) -> None:
    out.mkdir(parents=True)
    (out / ".DS_Store").write_text("")
    (out / "_SUCCESS").write_text("")
    assert check_output(storage, None, SAME, "fail") == "new"


def test_the_same_job_goes_on(storage: LocalStorage, job: JobRecord) -> None:
    assert check_output(storage, job, SAME, "resume") == "resume"


def test_a_job_that_committed_nothing_yet_goes_on(store: Store, storage: LocalStorage, out: Path) -> None:
    assert check_output(storage, create_job(store, out, 4), SAME, "resume") == "resume"


def test_a_job_whose_folder_was_removed_starts_anew(storage: LocalStorage, job: JobRecord) -> None:
    clear_output(storage)
    assert check_output(storage, job, SAME, "resume") == "new"


def test_another_jobs_folder_is_refused_unless_overwrite(storage: LocalStorage, job: JobRecord) -> None:
    with pytest.raises(RefusedError, match=rf"{job.job_id}.*--if-exists overwrite"):
        check_output(storage, job, OTHER, "resume")
    with pytest.raises(RefusedError, match="does not know"):
        check_output(storage, None, SAME, "resume")
    assert check_output(storage, job, OTHER, "overwrite") == "new"


def test_fail_refuses_even_the_same_job(storage: LocalStorage, job: JobRecord) -> None:
    with pytest.raises(RefusedError, match="--if-exists fail"):
        check_output(storage, job, SAME, "fail")


@pytest.mark.parametrize("name", ["notes.txt", "part-0-abc.snappy.parquet", "part-00000.csv"])
def test_a_folder_with_foreign_files_is_refused_also_for_overwrite(
    storage: LocalStorage, job: JobRecord, out: Path, name: str
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


def test_a_folder_that_nobody_can_write_is_refused() -> None:
    with pytest.raises(RefusedError, match="can't be written"):
        check_output(open_storage("/proc/gristmill"), None, SAME, "resume")


def test_an_input_in_the_output_folder_is_refused(storage: LocalStorage, out: Path) -> None:
    with pytest.raises(RefusedError, match="lies in the output folder"):
        check_output(storage, None, SAME, "overwrite", [str(out / "part-00000.parquet")])


def test_clearing_takes_our_files_only(storage: LocalStorage, job: JobRecord, out: Path) -> None:
    storage.put("_manifest.json", b"{}")
    storage.put("_attempts/00001-1-abc.parquet", b"")
    (out / "_notes").write_text("mine")
    (out / "notes.txt").write_text("mine")
    clear_output(storage)
    assert storage.names() == ["_notes", "notes.txt"]


def test_parts_that_an_earlier_job_left_are_removed_before_the_new_one_goes_on(
    store: Store, storage: LocalStorage, out: Path
) -> None:
    run_all(store, storage, create_job(store, out, 2, 2))
    storage.put("_manifest.json", b"{}")
    newer = create_job(store, out, 4)
    assert redo_publications(storage, store, newer.job_id) == 0
    assert storage.names() == ["_attempts"]
    run_all(store, storage, newer)
    assert redo_publications(storage, store, newer.job_id) == 0
    assert storage.names() == ["_attempts", "part-00000.parquet"]


def test_a_sweep_takes_attempts_and_half_files(storage: LocalStorage, job: JobRecord, out: Path) -> None:
    storage.put("_attempts/00001-1-abc.parquet", b"")
    (out / "_attempts" / ".00001-1-def.parquet.1234.tmp").write_bytes(b"half")
    (out / "._manifest.json.1234.tmp").write_bytes(b"half")
    sweep_attempts(storage)
    sweep_attempts(storage)
    assert storage.names() == ["part-00000.parquet"]


def test_an_identity_is_all_that_makes_a_job_the_same(storage: LocalStorage, job: JobRecord) -> None:
    assert check_output(storage, replace(job, identity=OTHER), OTHER, "resume") == "resume"
