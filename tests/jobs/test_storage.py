"""The output folder as an object store: a file appears whole or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jobs.errors import OutputError
from jobs.storage import LocalStorage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return open_storage(str(tmp_path / "out"))


def test_a_file_is_not_there_until_it_is_whole(storage: LocalStorage) -> None:
    with storage.create("a/b.txt") as file:
        file.write(b"one ")
        file.write(memoryview(b"two"))
        assert storage.size("a/b.txt") is None
    assert storage.read("a/b.txt") == b"one two"
    assert (file.size, file.sha256) == (7, hashlib.sha256(b"one two").hexdigest())
    assert storage.names("a") == ["b.txt"]


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(storage: LocalStorage) -> None:
    storage.put("a", b"old")
    with pytest.raises(KeyboardInterrupt), storage.create("a") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert (storage.read("a"), storage.names()) == (b"old", ["a"])


def test_a_rename_replaces_and_says_whether_there_was_something(storage: LocalStorage) -> None:
    storage.put("new", b"new")
    storage.put("old", b"old")
    assert storage.rename("new", "old")
    assert not storage.rename("new", "old")
    assert (storage.read("old"), storage.names()) == (b"new", ["old"])


def test_deleting_what_is_not_there_is_fine(storage: LocalStorage) -> None:
    storage.put("folder/file", b"")
    storage.delete("folder/file")
    storage.delete("folder")
    storage.delete("folder")
    assert storage.names() == storage.names("nowhere") == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"can't write .*file/out/a .*run again"):
        open_storage(str(tmp_path / "file" / "out")).put("a", b"")
