"""Reading from S3: an object as a seekable file, and whole objects copied from it, checked, into local files.

All bytes come by ranged GETs, larger ones where an object is read on and on. Every GET names the version (ETag)
that was planned, so that a changed object is never mixed with the old one.
"""

from __future__ import annotations

import hashlib
import io
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

from botocore.exceptions import ClientError

from gristmill.jobs.errors import (
    JobsError,
    OutputError,
    OutputUnavailable,
    SourceError,
    SourceUnavailable,
    Unavailable,
)
from gristmill.jobs.storage.s3.client import Kind, is_refused_condition, s3_client, s3_errors, split_s3_uri

READ_AHEAD_BYTES = 8 << 20
_FIRST_BYTES = 64 << 10
_GET_BYTES = 32 << 20
_HELD_BYTES = 32 << 20
_MAX_WINDOWS = 64
_COPY_BYTES = 16 << 20
MAX_TRIES = 5  # of a body that breaks off or comes damaged; botocore repeats only what fails before the body
_RETRY_S = 0.2


class S3Object(NamedTuple):
    """One version of an object, as a listing or a HEAD shows it."""

    uri: str
    size_bytes: int
    version: str  # the ETag without its quotes
    metadata: Mapping[str, str] = {}  # of a HEAD
    is_private: bool = False  # encrypted with a key of the user's: the ETag is no MD5


def find_object(uri: str, kind: Kind = "source", client: Any = None) -> S3Object | None:
    """The object of exactly that key; None when there is none, or no such bucket."""
    bucket, key = split_s3_uri(uri)
    try:
        with s3_errors(uri, kind):
            head = (client or s3_client()).head_object(Bucket=bucket, Key=key)
            return S3Object(
                uri,
                int(head["ContentLength"]),
                strip_etag(head["ETag"]),
                head["Metadata"],
                "SSECustomerAlgorithm" in head
                or str(head.get("ServerSideEncryption", "")).startswith("aws:kms"),
            )
    except FileNotFoundError:
        return None


def copy_object(
    uri: str,
    file: BinaryIO,
    algorithm: str,
    is_intact: Callable[[S3Object, str], bool],
    kind: Kind = "source",
    client: Any = None,
) -> S3Object | None:
    """Copies the object as it is now into a local file, which it rewinds; None: it came damaged every time.

    `is_intact` judges a copy by the object and the hex digest of what came. Raises FileNotFoundError; the errors
    of writing come through as they are.
    """
    for _ in range(MAX_TRIES):
        found = find_object(uri, kind, client)
        if found is None:
            raise FileNotFoundError(f"{uri} is missing")
        file.seek(0)
        file.truncate()
        digest = hashlib.new(algorithm, usedforsecurity=False)
        with S3File(uri, found.version, found.size_bytes, kind=kind, client=client) as source:
            try:
                while block := source.read(_COPY_BYTES):
                    digest.update(block)
                    file.write(block)
            except JobsError:
                if not source.has_changed:
                    raise
                continue  # somebody replaced it meanwhile: the new one is as good
        file.seek(0)
        if is_intact(found, digest.hexdigest()):
            return found
    return None


class _Window:
    """Bytes of the object that were fetched and are kept for a while."""

    __slots__ = ("data", "start")

    def __init__(self, start: int, data: bytes) -> None:
        self.start = start
        self.data = data

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class S3File(io.RawIOBase):
    """Reads one version of an object. Several places of it may be read in turn, each from its start onwards.

    A read that goes on where a fetched window ends fetches twice as much as the window had, up to 8 MiB;
    `expect` keeps that within the ranges that will be read. Holds at most about 32 MiB. SourceError when the
    object changed or is gone, SourceUnavailable when the store does not answer; for the kind "output" OutputError,
    FileNotFoundError and OutputUnavailable. For one thread at a time.
    """

    def __init__(
        self, uri: str, version: str, size_bytes: int, *, kind: Kind = "source", client: Any = None
    ) -> None:
        super().__init__()
        self.uri = uri
        self.size_bytes = size_bytes
        self.has_changed = False  # since this version
        self._kind: Kind = kind
        self._client = client or s3_client()
        self._version = version
        self._bucket, self._key = split_s3_uri(uri)
        self._position = 0
        self._windows: list[_Window] = []  # the one used last is at the end
        self._borders: list[int] = []  # that no read-ahead crosses; []: none

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Only these ranges (begin, end) will be read on and on: no read-ahead crosses the end of one."""
        self._borders = sorted({border for begin_end in ranges for border in begin_end})

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves the position; fetches nothing."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if start + offset < 0:
            raise ValueError(f"can't seek to {start + offset}, before the start of the file")
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """The next `size` bytes, fewer only at the end; all that is left when it is negative or None."""
        left = max(0, self.size_bytes - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        parts: list[memoryview] = []
        while wanted:
            window = self._find_window() or self._fetch(wanted)
            offset = self._position - window.start
            part = memoryview(window.data)[offset : offset + wanted]
            parts.append(part)
            wanted -= len(part)
            self._position += len(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: Any, /) -> int:
        """Fills a buffer; fewer bytes only at the end."""
        data = self.read(memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Gives the fetched bytes up."""
        self._windows.clear()
        super().close()

    def _find_window(self) -> _Window | None:
        for index in range(len(self._windows) - 1, -1, -1):
            window = self._windows[index]
            if window.start <= self._position < window.end:
                self._windows.append(self._windows.pop(index))
                return window
        return None

    def _fetch(self, wanted: int) -> _Window:
        """A new window at the position, of `wanted` bytes or more; it replaces the one that it follows."""
        start = self._position
        size = _FIRST_BYTES
        for index, window in enumerate(self._windows):
            if window.end == start:
                share = _HELD_BYTES // len(self._windows)
                size = min(2 * len(window.data), READ_AHEAD_BYTES, share)
                del self._windows[index]
                break
        size = max(min(wanted, _GET_BYTES), min(size, self._find_border(start) - start))
        fetched = _Window(start, self._get(start, min(size, self.size_bytes - start)))
        self._windows.append(fetched)
        held = sum(len(window.data) for window in self._windows)
        while len(self._windows) > 1 and (held > _HELD_BYTES or len(self._windows) > _MAX_WINDOWS):
            held -= len(self._windows.pop(0).data)
        return fetched

    def _find_border(self, start: int) -> int:
        """How far a read from `start` may go ahead."""
        if not self._borders:
            return self.size_bytes
        after = bisect_right(self._borders, start)
        return self._borders[after] if after < len(self._borders) else start

    def _get(self, start: int, size: int) -> bytes:
        for attempt in range(MAX_TRIES):
            body = self._open_body(start, size)
            try:
                with s3_errors(self.uri, self._kind):
                    data: bytes = body.read()
                if len(data) == size:
                    return data
            except Unavailable:
                if attempt + 1 == MAX_TRIES:
                    raise
            finally:
                body.close()
            time.sleep(_RETRY_S * 2**attempt)
        unavailable = SourceUnavailable if self._kind == "source" else OutputUnavailable
        raise unavailable(f"can't read {self.uri!r} now: the store sends fewer bytes than were asked for")

    def _open_body(self, start: int, size: int) -> Any:
        place = {"Bucket": self._bucket, "Key": self._key, "Range": f"bytes={start}-{start + size - 1}"}
        try:
            with s3_errors(self.uri, self._kind):
                try:
                    response = self._client.get_object(**place, IfMatch=f'"{self._version}"')
                except ClientError as error:
                    if is_refused_condition(error) or _is_beyond_end(error):
                        raise self._changed() from None
                    raise
        except FileNotFoundError:
            if self._kind == "output":
                raise
            raise SourceError(f"can't read {self.uri!r}: it is gone; restore it") from None
        if strip_etag(response.get("ETag", "")) != self._version:  # a store that does not know If-Match
            response["Body"].close()
            raise self._changed()
        return response["Body"]

    def _changed(self) -> JobsError:
        self.has_changed = True
        if self._kind == "output":
            return OutputError(f"{self.uri!r} changed while it was read; run the same command again")
        return SourceError(f"{self.uri!r} changed since the job was planned; restore it, or start a new job")


def _is_beyond_end(error: ClientError) -> bool:
    return bool(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 416)


def strip_etag(etag: str) -> str:
    """An ETag without its quotes, as it is kept in Source.version."""
    return etag[1:-1] if len(etag) > 1 and etag[0] == etag[-1] == '"' else etag
