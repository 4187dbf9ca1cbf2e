"""Input files by URI, on local disk or S3: their size and version, and their bytes, opened at once or in numbers.

Here is the one place that knows which kinds of URI can be read. boto3 takes a third of a second to import, so
only who reads from S3 waits for it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from gristmill.jobs.errors import RefusedError, SourceError, SourceUnavailable
from gristmill.jobs.storage.folder import is_s3

_PARALLEL = 16  # requests that wait for a distant store at the same time
_FEW = 4

T = TypeVar("T")
R = TypeVar("R")


class InputStat(NamedTuple):
    """What tells whether a file is still the same."""

    size_bytes: int
    version: str  # local: mtime in ns; S3: the ETag


def stat_input(uri: str) -> InputStat:
    """Size and version of a file as it is now. SourceError when it can't be read."""
    if is_s3(uri):
        from gristmill.jobs.storage.s3.reader import find_object

        found = find_object(uri)
        if found is None:
            raise SourceError(f"can't read {uri!r}: it is gone; restore it")
        return InputStat(found.size_bytes, found.version)
    try:
        status = os.stat(uri)
    except OSError as error:
        raise SourceError(f"can't read {uri!r}: {error.strerror}; restore it") from None
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(f"input {uri!r} is not a regular file; write it to a file first")
    return InputStat(status.st_size, str(status.st_mtime_ns))


def open_input(uri: str, version: str | None = None, size_bytes: int | None = None) -> Any:
    """A seekable binary file, for pyarrow too. An S3 object is read in this version only; None: the present one.

    `size_bytes` and `version` of a Source save a request. SourceError when the file can't be opened.
    """
    if is_s3(uri):
        from gristmill.jobs.storage.s3.reader import S3File

        if version is None or size_bytes is None:
            found = stat_input(uri)
            version, size_bytes = version or found.version, found.size_bytes
        return S3File(uri, version, size_bytes)
    try:
        return pa.OSFile(uri, "rb")
    except OSError as error:
        raise SourceError(f"can't read {uri!r}: {error}; restore it") from None


def expect_ranges(file: Any, ranges: Iterable[tuple[int, int]]) -> None:
    """Tells a file from open_input which bytes (begin, end) will be read, so that no others are fetched."""
    if isinstance(file, io.RawIOBase):
        from gristmill.jobs.storage.s3.reader import S3File

        assert isinstance(file, S3File)
        file.expect(ranges)


def map_inputs(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """function(item) for each, in order; several at a time, since each may wait for a distant store."""
    listed = list(items)
    if len(listed) <= _FEW:
        yield from map(function, listed)
        return
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="inputs") as pool:
        try:
            yield from pool.map(function, listed)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def refuse_unreadable(error: SourceError) -> RefusedError:
    """The same fault, found before the job began. An outage is none: it is raised again as it is."""
    if isinstance(error, SourceUnavailable):
        raise error
    return RefusedError(str(error))
