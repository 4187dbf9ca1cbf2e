"""What a part is written through: a file that counts and hashes, whatever storage it goes to."""

from __future__ import annotations

import errno
import hashlib
from typing import BinaryIO

from gristmill.jobs.errors import OutputError

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
        """Nothing: the storage closes the file, after it has made it last."""

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


def write_error(place: str, error: OSError) -> OutputError:
    """What a refused write on a local disk means to the user."""
    if error.errno in _FULL:
        reason = _FULL[error.errno]
        return OutputError(f"{reason} while writing {place}: free space and run the same command again")
    return OutputError(f"can't write {place} ({error.strerror or error}): make it writable and run again")
