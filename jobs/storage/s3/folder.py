"""Storage in S3 and its like. A part is finished on local disk, then put: no reader ever sees half an object.

Metadata says what an object is: the SHA-256 of what was put, or the attempt that a part was copied from.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, cast

from botocore.exceptions import ClientError

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import OutputError, OutputUnavailable, RefusedError, Unavailable
from gristmill.jobs.storage.hashing_file import HashingFile, write_error
from gristmill.jobs.storage.s3.client import is_refused_condition, s3_client, s3_errors, split_s3_uri
from gristmill.jobs.storage.s3.file import S3InputFile, strip_etag
from gristmill.jobs.storage.s3.upload import PART_BYTES, put_file, put_object

_SPOOL_BYTES = 8 << 20
_COPY_BYTES = 1 << 20
_FETCH_TRIES = 4
_RETRY_S = 0.2
_DELETE_BATCH = 1000  # what one DeleteObjects takes
_SHA256 = "gristmill-sha256"
_ATTEMPT = "gristmill-attempt"


class _Fetched(NamedTuple):
    file: BinaryIO
    sha256: str
    metadata: Mapping[str, str]


class S3Storage:
    """Objects below one prefix (see gristmill.jobs.storage.folder.Storage for what each method promises)."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self._bucket, self._prefix = split_s3_uri(self.root)
        self._client = s3_client()

    def place(self, name: str = "") -> str:
        """The URI of an object."""
        return f"{self.root}/{name}" if name else self.root

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        """A local temporary file to write; it is put when the block ends without an exception."""
        try:
            with tempfile.TemporaryFile(prefix="gristmill-") as raw:
                file = HashingFile(cast(BinaryIO, raw))
                yield file
                raw.seek(0)
                self._upload(name, cast(BinaryIO, raw), file)
        except OSError as error:
            on_the_way = f"a temporary file in {tempfile.gettempdir()} for {self.place(name)}"
            raise write_error(on_the_way, error) from error

    def put(self, name: str, data: bytes) -> None:
        """Writes a small object in one go."""
        with self._errors(name):
            put_object(self._client, self._at(name), data, _metadata_of(data))

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes an object that must not be there yet; whether it holds `data` now.

        412 may be the answer to our own success whose reply was lost, so the bytes decide.
        """
        with self._errors(name):
            try:
                put_object(self._client, self._at(name), data, _metadata_of(data), IfNoneMatch="*")
                return True
            except ClientError as error:
                if not is_refused_condition(error):
                    raise
        return self.read(name) == data

    def open(self, name: str) -> BinaryIO:
        """A reader of the object as it is now; it fetches only what is read."""
        head = self._head(name)
        if head is None:
            raise FileNotFoundError(f"{self.place(name)} is missing")
        etag, size = strip_etag(head["ETag"]), int(head["ContentLength"])
        return cast(BinaryIO, S3InputFile(self.place(name), etag, size, kind="output"))

    def open_checked(self, name: str, sha256: str) -> BinaryIO:
        """A reader of the object as it is now. Raises ValueError for other bytes than expected."""
        for _ in range(_FETCH_TRIES):
            file, found, _ = self._fetch(name)
            if found == sha256:
                return file
            file.close()
        raise ValueError(f"{self.place(name)} holds other bytes than expected")

    def read(self, name: str) -> bytes:
        """The bytes of a small object, checked where its metadata has their SHA-256."""
        for _ in range(_FETCH_TRIES):
            file, found, metadata = self._fetch(name)
            with file:
                if metadata.get(_SHA256, found) == found:
                    return file.read()
        raise OutputUnavailable(f"{self.place(name)} arrives damaged: tried again")

    def size(self, name: str) -> int | None:
        """Bytes of an object; None when there is none."""
        head = self._head(name)
        return None if head is None else int(head["ContentLength"])

    def publish(self, attempt: str, name: str) -> bool:
        """Copies the attempt inside the server, unless `name` is that copy; False: the attempt is gone."""
        head = self._head(name)
        if head is not None and head["Metadata"].get(_ATTEMPT) == attempt:
            return True
        try:
            with self._errors(name):
                self._client.copy_object(
                    **self._at(name),
                    CopySource=self._at(attempt),
                    MetadataDirective="REPLACE",
                    Metadata={_ATTEMPT: attempt},
                )
        except FileNotFoundError:
            return False
        return True

    def holds(self, name: str, attempt: str, size: int) -> bool:
        """Whether `name` is the copy of that attempt."""
        head = self._head(name)
        return head is not None and (head["Metadata"].get(_ATTEMPT), head["ContentLength"]) == (attempt, size)

    def delete(self, name: str) -> None:
        """Removes an object."""
        with self._errors(name), suppress(FileNotFoundError):
            self._client.delete_object(**self._at(name))

    def delete_all(self, names: Iterable[str]) -> None:
        """Removes many objects, 1000 a request."""
        left = iter(names)
        while batch := list(itertools.islice(left, _DELETE_BATCH)):
            doomed = {"Objects": [{"Key": self._key(name)} for name in batch], "Quiet": True}
            with self._errors():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=doomed)
            for failed in answer.get("Errors", ())[:1]:
                raise OutputUnavailable(
                    f"can't delete {failed.get('Key')} in {self.root} ({failed.get('Code')}): tried again"
                )

    def names(self, folder: str = "") -> list[str]:
        """Names of the objects and folders directly in `folder`, sorted."""
        prefix = self._key(f"{folder}/" if folder else "")
        found: set[str] = set()
        with self._errors(folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/"
            )
            for page in pages:
                found.update(entry["Key"].removeprefix(prefix) for entry in page.get("Contents", ()))
                below = (entry["Prefix"] for entry in page.get("CommonPrefixes", ()))
                found.update(key.removeprefix(prefix).rstrip("/") for key in below if self._has_objects(key))
        return sorted(found - {""})

    def check_writable(self) -> None:
        """Puts a small object where the output will go, and takes it back."""
        name = f".gristmill-check-{uuid.uuid4().hex}"
        try:
            self.put(name, b"gristmill")
            self.delete(name)
        except Unavailable:
            raise
        except OutputError as error:
            raise RefusedError(f"--output {self.root} can't be written: {error}") from error

    def sweep(self) -> None:
        """Aborts unfinished uploads of this folder's own objects, not of other outputs below it."""
        prefix = self._key("")
        with self._errors():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                name = upload["Key"].removeprefix(prefix)
                if "/" not in name or name.startswith("_"):
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

    def _upload(self, name: str, raw: BinaryIO, file: HashingFile) -> None:
        metadata = {_SHA256: file.sha256}
        reach("put.before")
        with self._errors(name):
            if file.size <= PART_BYTES:
                put_object(self._client, self._at(name), raw.read(), metadata)
            else:
                put_file(self._client, self._at(name), raw, metadata)
        reach("put.after")
        head = self._head(name)
        if head is None or (head["ContentLength"], head["Metadata"].get(_SHA256)) != (file.size, file.sha256):
            found = "nothing" if head is None else f"{head['ContentLength']} bytes"
            raise OutputUnavailable(
                f"{self.place(name)} holds {found} after {file.size} bytes were put: tried again"
            )

    def _fetch(self, name: str) -> _Fetched:
        """The whole object in a local temporary file."""
        for attempt in itertools.count(1):
            with self._errors(name):
                answer = self._client.get_object(**self._at(name))
            body = answer["Body"]
            file = cast(BinaryIO, tempfile.SpooledTemporaryFile(_SPOOL_BYTES, prefix="gristmill-"))
            try:
                with self._errors(name):
                    return _Fetched(file, _copy(body, file), answer["Metadata"])
            except OutputUnavailable:  # botocore tries again only until the body begins
                file.close()
                if attempt == _FETCH_TRIES:
                    raise
            except BaseException:
                file.close()
                raise
            finally:
                body.close()
            time.sleep(_RETRY_S * attempt)
        raise AssertionError("the loop ends by return or raise")

    def _head(self, name: str) -> Any:
        """What HEAD says of an object; None when there is none."""
        with suppress(FileNotFoundError), self._errors(name):
            return self._client.head_object(**self._at(name))
        return None

    def _has_objects(self, prefix: str) -> bool:
        """Some servers list a folder for a while after its last object is gone."""
        page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, MaxKeys=1)
        return bool(page.get("Contents"))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(name)}

    def _errors(self, name: str = "") -> AbstractContextManager[None]:
        return s3_errors(self.place(name), "output")


def _metadata_of(data: bytes) -> dict[str, str]:
    return {_SHA256: hashlib.sha256(data).hexdigest()}


def _copy(body: Any, file: BinaryIO) -> str:
    """Copies a body into a local file, and goes back to its start; returns the SHA-256."""
    digest = hashlib.sha256()
    for block in body.iter_chunks(_COPY_BYTES):
        digest.update(block)
        try:
            file.write(block)
        except OSError as error:
            raise write_error(f"a temporary file in {tempfile.gettempdir()}", error) from error
    file.seek(0)
    return digest.hexdigest()
