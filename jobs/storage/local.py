"""Storage on local disk: temporary name, fsync, rename. A disk that fills becomes OutputError."""

from __future__ import annotations

import errno
import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import RefusedError
from gristmill.jobs.storage.hashing_file import HashingFile, write_error

TEMPORARY_SUFFIX = ".tmp"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class LocalStorage:
    """Files below one folder (see gristmill.jobs.storage.folder.Storage for what each method promises)."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)

    def path(self, name: str = "") -> Path:
        """Where a file lies."""
        return Path(self.root, name)

    def place(self, name: str = "") -> str:
        """Where a file lies, for messages."""
        return str(self.path(name))

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        """A file to write; on success it is synced and renamed to `name`, on any failure nothing is left."""
        with self._temporary(name) as (raw, temporary, target):
            yield HashingFile(raw)
            _sync_file(raw)
            reach("put.before")
            os.replace(temporary, target)
            _sync_folder(target.parent)
            reach("put.after")

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file in one go."""
        with self.create(name) as file:
            file.write(data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a file that must not be there yet; whether it holds `data` now.

        A second name (link) for a whole temporary file: unlike a rename it never replaces.
        """
        with self._temporary(name) as (raw, temporary, target):
            raw.write(data)
            _sync_file(raw)
            _link_new(temporary, target)
            _sync_folder(target.parent)
            return target.read_bytes() == data

    def open(self, name: str) -> BinaryIO:
        """The file, open for reading."""
        return self.path(name).open("rb")

    def open_checked(self, name: str, sha256: str) -> BinaryIO:
        """The file, open for reading; a disk's bytes are taken at their word."""
        return self.open(name)

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        return self.path(name).read_bytes()

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return self.path(name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def publish(self, attempt: str, name: str) -> bool:
        """Renames the attempt, atomically; False when it is not there (any more)."""
        with self._translated_errors(name):
            try:
                os.replace(self.path(attempt), self.path(name))
            except FileNotFoundError:
                return False
            _sync_folder(self.path(name).parent)
            return True

    def holds(self, name: str, attempt: str, size: int) -> bool:
        """Whether there is such a file of that size."""
        return self.size(name) == size

    def delete(self, name: str) -> None:
        """Removes a file or an empty folder; what is not there is as good as removed."""
        path = self.path(name)
        with self._translated_errors(name), suppress(FileNotFoundError):
            if not path.is_dir() or path.is_symlink():
                path.unlink()
            elif not os.listdir(path):
                path.rmdir()

    def delete_all(self, names: Iterable[str]) -> None:
        """Removes many files."""
        for name in names:
            self.delete(name)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in `folder`, sorted; none when it does not exist."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def check_writable(self) -> None:
        """Reads the folder, writes a file where the output will go, and takes it back."""
        root = self.path()
        if root.exists() and not root.is_dir():
            raise RefusedError(f"--output {root} is a file: name a folder")
        existing = next(folder for folder in (root, *root.parents) if os.path.lexists(folder))
        try:
            os.listdir(existing)
            with tempfile.TemporaryFile(dir=existing, prefix=".gristmill-"):
                pass
        except OSError as error:
            raise RefusedError(
                f"--output {root} can't be written ({error.strerror}): name another, or change its permissions"
            ) from error

    def sweep(self) -> None:
        """Removes temporary files directly in the folder."""
        self.delete_all(
            name for name in self.names() if name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)
        )

    @contextmanager
    def _temporary(self, name: str) -> Iterator[tuple[BinaryIO, Path, Path]]:
        """An open file that goes at the end unless it was renamed; its path, and that of the file it is for."""
        target = self.path(name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
        with self._translated_errors(name):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as raw:
                    yield raw, temporary, target
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()

    @contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self.place(name), error) from error


def _link_new(temporary: Path, target: Path) -> None:
    """Gives a whole file its name unless that is taken; where there are no links, by a look and a rename."""
    try:
        with suppress(FileExistsError):
            os.link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not target.exists():
            os.replace(temporary, target)


def _sync_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power cut; some network file systems can't, and say EINVAL."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
