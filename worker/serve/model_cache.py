"""Models that lie in S3, copied once to this machine: the engine maps files, it does not stream them.

The copy's folder is named by a hash of the objects' names, sizes and etags: a model that changes is copied anew.
Old copies are left where they are; delete the folder to have them back.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from gristmill.jobs.errors import RefusedError, SourceError, SourceUnavailable
from gristmill.jobs.storage.s3.client import s3_client, s3_errors, split_s3_uri

logger = logging.getLogger(__name__)

_GGUF = ".gguf"
_CONFIG = "config.json"
_CHUNK_BYTES = 8 << 20
_NUM_TRIES = 3
# Of a model's folder only these are read; pickled weights and other formats' weights stay where they are.
_SUFFIXES = (".json", ".safetensors", ".jinja")


class _Object(NamedTuple):
    key: str
    size_bytes: int
    etag: str


class ModelCache:
    """A folder of copies; safe for several processes at once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the copies go; default gristmill/models in the user's cache folder."""
        self._folder = folder

    def list_models(self, uri: str) -> list[tuple[str, str]]:
        """(name, URI) of the models directly below `uri`: *.gguf objects and folders with a config.json."""
        bucket, key = split_s3_uri(uri)
        prefix = key.rstrip("/") + "/" if key else ""
        with _refusals(uri):
            page = _list_level(bucket, prefix)
            names = [name for name in page if name.endswith(_GGUF)]
            folders = [name.rstrip("/") for name in page if name.endswith("/")]
            for name in folders:
                if any(True for _ in _list_objects(bucket, f"{prefix}{name}/{_CONFIG}")):
                    names.append(name)
        return [(name.removesuffix(_GGUF), f"s3://{bucket}/{prefix}{name}") for name in sorted(names)]

    def fetch(self, uri: str) -> Path:
        """The local copy of a model: a .gguf file or a folder. Raises RefusedError, SourceUnavailable."""
        bucket, _ = split_s3_uri(uri)
        with _refusals(uri):
            prefix, objects = self._find(uri)
            place = self._home() / _hash(uri, objects)
            if not place.is_dir():
                with _locked(place.with_suffix(".lock")):
                    if not place.is_dir():  # another process made it while we waited
                        _copy(bucket, prefix, objects, place)
        return place / PurePosixPath(objects[0].key).name if uri.endswith(_GGUF) else place

    def _find(self, uri: str) -> tuple[str, list[_Object]]:
        """The objects of a model, and what of their keys is not part of their names."""
        bucket, key = split_s3_uri(uri)
        if uri.endswith(_GGUF):
            prefix = key.rpartition("/")[0] + "/" if "/" in key else ""
            objects = [item for item in _list_objects(bucket, key) if item.key == key]
        else:
            prefix = key.rstrip("/") + "/" if key else ""
            objects = [item for item in _list_objects(bucket, prefix) if _is_of_model(item.key, prefix)]
        if not objects:
            raise RefusedError(f"no model at {uri}: name a {_GGUF} object, or a prefix with a {_CONFIG}")
        return prefix, objects

    def _home(self) -> Path:
        if self._folder is not None:
            return self._folder
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(cache) / "gristmill" / "models"


def is_s3_uri(place: str) -> bool:
    return place.startswith("s3://")


def _list_level(bucket: str, prefix: str) -> list[str]:
    """Names directly below the prefix; those of folders end in a slash."""
    pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/")
    keys: list[str] = []
    for page in pages:
        keys += [item["Key"] for item in page.get("Contents", ())]
        keys += [item["Prefix"] for item in page.get("CommonPrefixes", ())]
    return [key.removeprefix(prefix) for key in keys if key != prefix]


def _list_objects(bucket: str, prefix: str) -> Iterator[_Object]:
    pages = s3_client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    for page in pages:
        for item in page.get("Contents", ()):
            yield _Object(item["Key"], int(item["Size"]), item["ETag"])


def _is_of_model(key: str, prefix: str) -> bool:
    """Whether it is a file of the model itself; folders below it hold other formats."""
    name = key.removeprefix(prefix)
    return bool(name) and "/" not in name and name.endswith(_SUFFIXES)


def _hash(uri: str, objects: list[_Object]) -> str:
    digest = hashlib.sha256(uri.rstrip("/").encode())
    for item in sorted(objects):
        digest.update(f"\0{item.key}\0{item.size_bytes}\0{item.etag}".encode())
    return digest.hexdigest()[:32]


def _copy(bucket: str, prefix: str, objects: list[_Object], place: Path) -> None:
    """All objects into a folder that appears whole; called under the lock."""
    unfinished = place.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    logger.info("copying a model from s3://%s/%s to %s", bucket, prefix, place)
    try:
        unfinished.mkdir()
        for item in objects:
            _copy_object(bucket, item, unfinished / item.key.removeprefix(prefix))
        os.rename(unfinished, place)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(
            f"the model s3://{bucket}/{prefix} can't be copied to {place.parent} ({reason}): free space there, or"
            " set XDG_CACHE_HOME to another place"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_object(bucket: str, item: _Object, target: Path) -> None:
    """One object, byte for byte: a body that is cut or damaged on its way is asked for again."""
    reason = ""
    for _ in range(_NUM_TRIES):
        try:
            if _is_intact(bucket, item, target):
                return
            reason = "the bytes are not those of its etag"
        except SourceUnavailable as error:
            reason = str(error)
        logger.warning("asking for %s again: %s", item.key, reason)
    raise SourceUnavailable(f"s3://{bucket}/{item.key} did not come whole in {_NUM_TRIES} tries ({reason})")


def _is_intact(bucket: str, item: _Object, target: Path) -> bool:
    """Copies the object once; whether what came is what was listed."""
    digest = hashlib.md5(usedforsecurity=False)
    size_bytes = 0
    with target.open("wb") as file:
        with _refusals(f"s3://{bucket}/{item.key}"):
            got = s3_client().get_object(Bucket=bucket, Key=item.key, IfMatch=item.etag)
            for chunk in got["Body"].iter_chunks(_CHUNK_BYTES):
                file.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size_bytes == item.size_bytes and _may_be(got, item.etag, digest.hexdigest())


def _may_be(got: dict[str, Any], etag: str, md5: str) -> bool:
    """Whether the bytes may have this etag: it is their MD5, but for multipart uploads and private keys."""
    is_md5 = len(etag.strip('"')) == 32 and not (
        str(got.get("ServerSideEncryption", "")).startswith("aws:kms") or "SSECustomerAlgorithm" in got
    )
    return not is_md5 or etag.strip('"').lower() == md5


@contextmanager
def _refusals(uri: str) -> Iterator[None]:
    """What the store says no to is a refusal; that it does not answer stays what it is."""
    try:
        with s3_errors(uri, "source"):
            yield
    except SourceUnavailable:
        raise
    except SourceError as error:
        raise RefusedError(str(error)) from error
    except FileNotFoundError as error:
        raise RefusedError(f"{uri} is not there (any more): start again") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; a lock goes with its process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RefusedError(
            f"the cache of models can't be written at {path} ({error.strerror}): set XDG_CACHE_HOME elsewhere"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
