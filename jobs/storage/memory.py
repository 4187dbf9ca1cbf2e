"""Storage in this process's memory, for tests: it publishes by copying, as S3 does, but without a server.

All openings of one URL in a process see the same files; they end with the process.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.storage.hashing_file import HashingFile

MEMORY_SCHEME = "memory://"


class _File(NamedTuple):
    data: bytes
    attempt: str | None = None  # what it was published from


class MemoryStorage:
    """Files in a dictionary (see gristmill.jobs.storage.folder.Storage for what each method promises)."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._files: dict[str, _File] = {}
        self._lock = threading.Lock()

    def place(self, name: str = "") -> str:
        """The URL of a file."""
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        """A file to write; it is there when the block ends without an exception."""
        raw = io.BytesIO()
        yield HashingFile(raw)
        self.put(name, raw.getvalue())

    def put(self, name: str, data: bytes) -> None:
        """Writes a file."""
        self._files[name] = _File(data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a file unless there is one; whether it holds `data` now."""
        return self._files.setdefault(name, _File(data)).data == data

    def open(self, name: str) -> BinaryIO:
        """A reader of the file as it is now."""
        return io.BytesIO(self.read(name))

    def open_checked(self, name: str, sha256: str) -> BinaryIO:
        """A reader of the file as it is now. Raises ValueError for other bytes than expected."""
        data = self.read(name)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{self.place(name)} holds other bytes than expected")
        return io.BytesIO(data)

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        if name not in self._files:
            raise FileNotFoundError(f"{self.place(name)} is missing")
        return self._files[name].data

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        file = self._files.get(name)
        return None if file is None else len(file.data)

    def publish(self, attempt: str, name: str) -> bool:
        """Copies the attempt, unless `name` is that copy; False when the attempt is not there (any more)."""
        with self._lock:
            published = self._files.get(name)
            if published is not None and published.attempt == attempt:
                return True
            file = self._files.get(attempt)
            if file is None:
                return False
            self._files[name] = _File(file.data, attempt)
            return True

    def holds(self, name: str, attempt: str, size: int) -> bool:
        """Whether `name` is the copy of that attempt."""
        file = self._files.get(name)
        return file is not None and (file.attempt, len(file.data)) == (attempt, size)

    def delete(self, name: str) -> None:
        """Removes a file."""
        self._files.pop(name, None)

    def delete_all(self, names: Iterable[str]) -> None:
        """Removes many files."""
        for name in names:
            self.delete(name)

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in `folder`, sorted."""
        prefix = f"{folder}/" if folder else ""
        below = (name.removeprefix(prefix) for name in list(self._files) if name.startswith(prefix))
        return sorted({name.split("/")[0] for name in below})

    def check_writable(self) -> None:
        """Always."""

    def sweep(self) -> None:
        """Nothing is ever half done."""


_places: dict[str, MemoryStorage] = {}


def open_memory(url: str) -> MemoryStorage:
    """The storage of `memory://NAME`, the same one for all who ask. Raises RefusedError for no name."""
    root = url.rstrip("/")
    if len(root) <= len(MEMORY_SCHEME):
        raise RefusedError(f"{url!r} is no place: write memory://NAME")
    return _places.setdefault(root, MemoryStorage(root))
