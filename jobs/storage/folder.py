"""The output folder as a small object store: whole files by name, on local disk or in S3.

Names are relative, with `/`. A file appears whole or not at all. Knows nothing of jobs and the database.
Attempts are files under names of their own, never written twice; publishing gives one its final name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.storage.local import LocalStorage


class Storage(Protocol):
    """One output folder. A place that doesn't answer raises OutputUnavailable: the same call may work later."""

    root: str  # an absolute path or s3://bucket/prefix; no slash at the end

    def place(self, name: str = "") -> str:
        """Where a file lies, for messages and readers."""
        ...

    def create(self, name: str) -> AbstractContextManager[HashingFile]:
        """A file to write; it gets its name, whole and durable, when the block ends without an exception."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file in one go."""
        ...

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a file that must not be there yet. True: it holds exactly `data`, by this call or an
        earlier one; False: it holds other bytes, which were left alone.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """A seekable reader of one version of the file. Raises FileNotFoundError."""
        ...

    def open_checked(self, name: str, sha256: str) -> BinaryIO:
        """Like open; over a network all bytes are fetched first, and ValueError is raised if they differ."""
        ...

    def read(self, name: str) -> bytes:
        """The bytes of a small file. Raises FileNotFoundError."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""
        ...

    def publish(self, attempt: str, name: str) -> bool:
        """Makes `name` the attempt's bytes, atomically; may be repeated. False: the attempt is gone.

        Local: a rename. S3: a copy inside the server; the attempt stays until it is deleted.
        """
        ...

    def holds(self, name: str, attempt: str, size: int) -> bool:
        """Whether `name` is that attempt's file (local disk: a file of that size)."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file or an empty folder; what is not there is as good as removed."""
        ...

    def delete_all(self, names: Iterable[str]) -> None:
        """Removes many files."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in `folder`, sorted; none when it does not exist."""
        ...

    def check_writable(self) -> None:
        """Tries a write where the output will go, and leaves nothing. Raises RefusedError."""
        ...

    def sweep(self) -> None:
        """Removes what killed writers left half done: temporary files, unfinished uploads."""
        ...


def is_s3(uri: str) -> bool:
    """Whether a URI names a place in S3."""
    return uri.startswith("s3://")


def open_storage(output: str) -> Storage:
    """The storage of an output folder; the folder itself appears with its first file."""
    if is_s3(output):
        from gristmill.jobs.storage.remote import S3Storage  # boto3 takes a third of a second

        return S3Storage(output)
    return LocalStorage(os.path.abspath(output))
