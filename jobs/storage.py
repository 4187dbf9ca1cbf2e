"""The output folder as a small object store: whole files by name, written under a temporary name and renamed.

Local disk only, for now. Knows nothing of parts or jobs; a disk that fills becomes OutputError.
"""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from jobs.errors import OutputError

TEMPORARY_SUFFIX = ".tmp"
_FULL = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota reached",
    errno.EFBIG: "file size limit reached",
}


class HashingFile:
    """A write-only binary file that counts and hashes what passes through it."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self._size = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Writes all of `data` (any object with the buffer interface)."""
        self._raw.write(data)
        self._hash.update(data)
        length = memoryview(data).nbytes
        self._size += length
        return length

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """Hands what is buffered to the system."""
        self._raw.flush()

    def close(self) -> None:
        """Nothing: the storage closes the file, after it has synced it."""

    def writable(self) -> bool:
        """True."""
        return True

    def readable(self) -> bool:
        """False."""
        return False

    def seekable(self) -> bool:
        """False."""
        return False

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._hash.hexdigest()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size


class LocalStorage:
    """Files below one folder. Names are relative, with `/`; a file appears whole or not at all."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Where a file lies."""
        return self.root / name

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        """A file to write; on success it is synced and renamed to `name`, on any failure nothing is left."""
        target = self.path(name)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
        with self._translated_errors(name):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with temporary.open("wb") as raw:
                    yield HashingFile(raw)
                    raw.flush()
                    os.fsync(raw.fileno())
                os.replace(temporary, target)
                _sync_folder(target.parent)
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file in one go."""
        with self.create(name) as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        return self.path(name).read_bytes()

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        try:
            return self.path(name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def rename(self, name: str, new_name: str) -> bool:
        """Replaces `new_name` by `name`, atomically; False when `name` is not there (any more)."""
        with self._translated_errors(new_name):
            try:
                os.replace(self.path(name), self.path(new_name))
            except FileNotFoundError:
                return False
            _sync_folder(self.path(new_name).parent)
            return True

    def delete(self, name: str) -> None:
        """Removes a file or an empty folder; what is not there is as good as removed."""
        with self._translated_errors(name), suppress(FileNotFoundError):
            path = self.path(name)
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in `folder`, sorted; none when it does not exist."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def _translated_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self.path(name)
            if error.errno in _FULL:
                reason = _FULL[error.errno]
                raise OutputError(
                    f"{reason} while writing {place}: free space and run the same command again"
                ) from error
            raise OutputError(
                f"can't write {place} ({error.strerror or error}): make it writable and run again"
            ) from error


def open_storage(output: str) -> LocalStorage:
    """The storage of an output folder; the folder itself appears with its first file."""
    return LocalStorage(Path(os.path.abspath(output)))


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
