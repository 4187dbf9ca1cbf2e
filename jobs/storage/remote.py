"""Storage in S3 and its like. A part is finished on local disk, then put: no reader ever sees half an object.

Metadata says what an object is: the SHA-256 of what was put, or the attempt that a part was copied from.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import BinaryIO, cast

from gristmill.jobs.crash_points import reach
from gristmill.jobs.errors import OutputError, OutputUnavailable, RefusedError, Unavailable
from gristmill.jobs.storage.hashing_file import HashingFile, write_error
from gristmill.jobs.storage.s3.client import Kind, s3_client, s3_errors, split_s3_uri
from gristmill.jobs.storage.s3.reader import S3File, S3Object, copy_object, find_object
from gristmill.jobs.storage.s3.writer import put_file, put_object

_SPOOL_BYTES = 8 << 20
_DELETE_BATCH = 1000  # what one DeleteObjects takes
_SHA256 = "gristmill-sha256"
_ATTEMPT = "gristmill-attempt"


class S3Storage:
    """Objects below one prefix (see gristmill.jobs.storage.folder.Storage for what each method promises)."""

    def __init__(self, root: str, kind: Kind = "output") -> None:
        """`kind`: whose errors are raised where something fails."""
        self.root = root.rstrip("/")
        self._kind: Kind = kind
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
        """Writes an object that must not be there yet; whether it holds `data` now."""
        with self._errors(name):
            if put_object(self._client, self._at(name), data, _metadata_of(data), is_new=True):
                return True
        return self.read(name) == data

    def open(self, name: str) -> BinaryIO:
        """A reader of the object as it is now; it fetches only what is read."""
        found = self.find(name)
        if found is None:
            raise FileNotFoundError(f"{self.place(name)} is missing")
        file = S3File(found.uri, found.version, found.size_bytes, kind=self._kind, client=self._client)
        return cast(BinaryIO, file)

    def open_checked(self, name: str, sha256: str) -> BinaryIO:
        """A reader of the object as it is now. Raises ValueError for other bytes than expected."""
        file = self._fetch(name, lambda found, came: came == sha256)
        if file is None:
            raise ValueError(f"{self.place(name)} holds other bytes than expected")
        return file

    def read(self, name: str) -> bytes:
        """The bytes of a small object, checked where its metadata has their SHA-256."""
        file = self._fetch(name, lambda found, came: found.metadata.get(_SHA256, came) == came)
        if file is None:
            raise OutputUnavailable(f"{self.place(name)} arrives damaged: tried again")
        with file:
            return file.read()

    def size(self, name: str) -> int | None:
        """Bytes of an object; None when there is none."""
        found = self.find(name)
        return None if found is None else found.size_bytes

    def find(self, name: str) -> S3Object | None:
        """What the server says of an object; None when there is none."""
        return find_object(self.place(name), self._kind, self._client)

    def publish(self, attempt: str, name: str) -> bool:
        """Copies the attempt inside the server, unless `name` is that copy; False: the attempt is gone."""
        found = self.find(name)
        if found is not None and found.metadata.get(_ATTEMPT) == attempt:
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
        found = self.find(name)
        return found is not None and (found.metadata.get(_ATTEMPT), found.size_bytes) == (attempt, size)

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
            put_file(self._client, self._at(name), raw, file.size, metadata)
        reach("put.after")
        found = self.find(name)
        if found is None or (found.size_bytes, found.metadata.get(_SHA256)) != (file.size, file.sha256):
            held = "nothing" if found is None else f"{found.size_bytes} bytes"
            raise OutputUnavailable(
                f"{self.place(name)} holds {held} after {file.size} bytes were put: tried again"
            )

    def _fetch(self, name: str, is_intact: Callable[[S3Object, str], bool]) -> BinaryIO | None:
        """The whole object in a local temporary file; None when it came damaged every time."""
        with ExitStack() as on_failure:
            try:
                spooled = on_failure.enter_context(
                    tempfile.SpooledTemporaryFile(_SPOOL_BYTES, prefix="gristmill-")
                )
                file = cast(BinaryIO, spooled)
                found = copy_object(self.place(name), file, "sha256", is_intact, self._kind, self._client)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise write_error(f"a temporary file in {tempfile.gettempdir()}", error) from error
            if found is not None:
                on_failure.pop_all()
                return file
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
        return s3_errors(self.place(name), self._kind)


def _metadata_of(data: bytes) -> dict[str, str]:
    return {_SHA256: hashlib.sha256(data).hexdigest()}
