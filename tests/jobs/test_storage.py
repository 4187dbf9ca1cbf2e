"""What every storage promises, held against local disk and a real S3 server."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from gristmill.jobs.errors import OutputError
from gristmill.jobs.storage.folder import Storage, open_storage
from gristmill.jobs.storage.local import LocalStorage
from gristmill.jobs.storage.remote import S3Storage


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(str(tmp_path / "deep" / "out"))
    return open_storage(f"{request.getfixturevalue('s3_root')}/deep/out/")


def test_an_output_says_which_storage_it_is(s3_root: str, tmp_path: Path) -> None:
    assert isinstance(open_storage(f"{s3_root}/out"), S3Storage)
    local = open_storage(f"{tmp_path}/x/../out/")
    assert isinstance(local, LocalStorage) and local.root == f"{tmp_path}/out"


def test_a_root_has_no_slash_at_its_end_and_places_are_below_it(storage: Storage) -> None:
    assert not storage.root.endswith("/")
    assert (storage.place(), storage.place("a/b")) == (storage.root, f"{storage.root}/a/b")


def test_a_file_is_not_there_until_it_is_whole(storage: Storage) -> None:
    with storage.create("a/b.txt") as file:
        file.write(b"one ")
        file.write(memoryview(b"two"))
        assert storage.size("a/b.txt") is None
    assert (storage.read("a/b.txt"), storage.size("a/b.txt")) == (b"one two", 7)
    assert (file.size, file.sha256) == (7, hashlib.sha256(b"one two").hexdigest())
    assert storage.names("a") == ["b.txt"]


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(storage: Storage) -> None:
    storage.put("a", b"old")
    with pytest.raises(KeyboardInterrupt), storage.create("a") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (storage.read("a"), storage.names()) == (b"old", ["a"])


def test_an_empty_file_is_a_file(storage: Storage) -> None:
    storage.put("empty", b"")
    with storage.create("also-empty"):
        pass
    assert (storage.read("empty"), storage.size("also-empty")) == (b"", 0)
    with storage.open("empty") as file:
        assert file.read() == b""


def test_a_reader_can_seek_and_read_lines(storage: Storage) -> None:
    data = b"one\ntwo\n" * 10_000
    storage.put("file", data)
    with storage.open("file") as file:
        assert file.seek(-4, 2) == len(data) - 4
        assert file.read() == b"two\n"
        file.seek(4)
        assert file.read(3) == b"two"
    with storage.open_checked("file", hashlib.sha256(data).hexdigest()) as file:
        assert list(file)[:3] == [b"one\n", b"two\n", b"one\n"]


def test_what_is_not_there_is_missing_everywhere(storage: Storage) -> None:
    for read in (storage.read, storage.open, lambda name: storage.open_checked(name, "0" * 64)):
        with pytest.raises(FileNotFoundError):
            read("nothing")
    assert storage.size("nothing") is None
    assert not storage.holds("nothing", "_attempts/x", 0)
    assert storage.names() == storage.names("nowhere") == []


def test_a_new_file_is_written_once_and_the_same_bytes_are_welcome_again(storage: Storage) -> None:
    assert storage.put_new("manifest", b"one")
    assert storage.put_new("manifest", b"one")
    assert not storage.put_new("manifest", b"two")
    assert (storage.read("manifest"), storage.names()) == (b"one", ["manifest"])


def test_one_of_many_writers_of_a_new_file_wins(storage: Storage) -> None:
    outcomes: dict[int, bool] = {}

    def write(number: int) -> None:
        outcomes[number] = storage.put_new("manifest", b"%d" % number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = int(storage.read("manifest"))
    assert outcomes == {number: number == winner for number in range(6)}


def test_publishing_gives_an_attempt_its_name_and_may_be_repeated(storage: Storage) -> None:
    storage.put("part-00000.jsonl", b"short")
    storage.put("_attempts/00000-2-b.jsonl", b"longer")
    assert storage.publish("_attempts/00000-2-b.jsonl", "part-00000.jsonl")
    assert storage.read("part-00000.jsonl") == b"longer"
    storage.publish("_attempts/00000-2-b.jsonl", "part-00000.jsonl")
    assert storage.holds("part-00000.jsonl", "_attempts/00000-2-b.jsonl", 6)
    assert not storage.holds("part-00000.jsonl", "_attempts/00000-2-b.jsonl", 7)


def test_an_attempt_that_is_gone_cannot_be_published(storage: Storage) -> None:
    storage.put("part-00000.jsonl", b"newer")
    assert not storage.publish("_attempts/00000-1-a.jsonl", "part-00000.jsonl")
    assert storage.read("part-00000.jsonl") == b"newer"


def test_deleting_what_is_not_there_is_fine(storage: Storage) -> None:
    storage.put("folder/file", b"")
    storage.delete("folder/file")
    for _ in range(2):
        storage.delete("folder")
    storage.delete_all(["a", "b/c"])
    storage.delete_all([])
    assert storage.names() == []


def test_a_folder_that_holds_files_is_not_deleted(storage: Storage) -> None:
    storage.put("folder/file", b"1")
    storage.delete("folder")
    assert storage.names("folder") == ["file"]


def test_names_are_the_direct_children(storage: Storage) -> None:
    for name in ("b", "a.txt", "folder/x", "folder/deep/y", "folder2/z", "tệp với dấu"):
        storage.put(name, b"1")
    assert storage.names() == ["a.txt", "b", "folder", "folder2", "tệp với dấu"]
    assert storage.names("folder") == ["deep", "x"]
    storage.delete_all(["folder/x", "folder/deep/y", "folder2/z"])
    assert storage.names("folder") in ([], ["deep"])  # a local disk keeps the folder


def test_a_sweep_leaves_whole_files_alone(storage: Storage) -> None:
    storage.put("part-00000.jsonl", b"1")
    storage.put("_attempts/x", b"2")
    storage.sweep()
    assert storage.names() == ["_attempts", "part-00000.jsonl"]


def test_checking_that_a_place_can_be_written_leaves_nothing(storage: Storage) -> None:
    storage.check_writable()
    assert storage.names() == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"can't write .*file/out/a .*run again"):
        open_storage(str(tmp_path / "file" / "out")).put("a", b"")


def test_half_files_of_a_local_folder_are_swept(tmp_path: Path) -> None:
    (tmp_path / "._manifest.json.1234.tmp").write_bytes(b"half")
    (tmp_path / ".hidden").write_bytes(b"mine")
    open_storage(str(tmp_path)).sweep()
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_disk_without_links_still_takes_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    storage = open_storage(str(tmp_path))
    assert storage.put_new("manifest", b"one")
    assert storage.put_new("manifest", b"one")
    assert not storage.put_new("manifest", b"two")
    assert storage.names() == ["manifest"]
