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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gristmill.jobs.errors import RefusedError, SourceError, SourceUnavailable
from gristmill.jobs.storage.remote import S3Storage
from gristmill.jobs.storage.s3.client import split_s3_uri
from gristmill.jobs.storage.s3.reader import MAX_TRIES, S3Object, copy_object

logger = logging.getLogger(__name__)

_GGUF = ".gguf"
_CONFIG = "config.json"
# Of a model's folder only these are read; pickled weights and other formats' weights stay where they are.
_SUFFIXES = (".json", ".safetensors", ".jinja")


class ModelCache:
    """A folder of copies; safe for several processes at once."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: where the copies go; default gristmill/models in the user's cache folder."""
        self._folder = folder

    def list_models(self, uri: str) -> list[tuple[str, str]]:
        """(name, URI) of the models directly below `uri`: *.gguf objects and folders with a config.json."""
        with _refusals(uri):
            storage = S3Storage(uri, "source")
            return [
                (name.removesuffix(_GGUF), storage.place(name))
                for name in storage.names()
                if (name.endswith(_GGUF) and storage.find(name)) or storage.find(f"{name}/{_CONFIG}")
            ]

    def fetch(self, uri: str) -> Path:
        """The local copy of a model: a .gguf file or a folder. Raises RefusedError, SourceUnavailable."""
        with _refusals(uri):
            objects = _find_objects(uri)
            place = self._home() / _hash(uri, objects)
            if not place.is_dir():
                with _locked(place.with_suffix(".lock")):
                    if not place.is_dir():  # another process made it while we waited
                        _copy(uri, objects, place)
        return place / _name(objects[0]) if uri.endswith(_GGUF) else place

    def _home(self) -> Path:
        if self._folder is not None:
            return self._folder
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return Path(cache) / "gristmill" / "models"


def _find_objects(uri: str) -> list[S3Object]:
    """The files of the model itself; folders below it hold other formats."""
    folder, _, name = uri.rpartition("/") if uri.endswith(_GGUF) else (uri, "", "")
    storage = S3Storage(folder, "source")
    names = [name] if name else [name for name in storage.names() if name.endswith(_SUFFIXES)]
    objects = [found for name in names if (found := storage.find(name)) is not None]
    if not objects:
        raise RefusedError(f"no model at {uri}: name a {_GGUF} object, or a prefix with a {_CONFIG}")
    return objects


def _name(item: S3Object) -> str:
    return item.uri.rpartition("/")[2]


def _hash(uri: str, objects: Sequence[S3Object]) -> str:
    digest = hashlib.sha256(uri.rstrip("/").encode())
    for item in sorted(objects):
        digest.update(f'\0{split_s3_uri(item.uri).key}\0{item.size_bytes}\0"{item.version}"'.encode())
    return digest.hexdigest()[:32]


def _copy(uri: str, objects: Sequence[S3Object], place: Path) -> None:
    """All objects into a folder that appears whole; called under the lock."""
    unfinished = place.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    logger.info("copying a model from %s to %s", uri, place)
    try:
        unfinished.mkdir()
        for item in objects:
            _copy_file(item, unfinished / _name(item))
        os.rename(unfinished, place)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise RefusedError(
            f"the model {uri} can't be copied to {place.parent} ({reason}): free space there, or"
            " set XDG_CACHE_HOME to another place"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_file(item: S3Object, target: Path) -> None:
    """One object, byte for byte."""

    def is_intact(found: S3Object, md5: str) -> bool:
        if found.version != item.version:
            raise RefusedError(f"{item.uri} changed while it was copied: start again")
        is_md5 = len(item.version) == 32 and not found.is_private  # else it was uploaded by parts
        if is_md5 and item.version.lower() != md5:
            logger.warning("asking for %s again: the bytes are not those of its etag", item.uri)
            return False
        return True

    with target.open("wb") as file:
        if copy_object(item.uri, file, "md5", is_intact) is None:
            raise SourceUnavailable(
                f"{item.uri} did not come whole in {MAX_TRIES} tries (the bytes are not those of its etag)"
            )
        os.fsync(file.fileno())


@contextmanager
def _refusals(uri: str) -> Iterator[None]:
    """What the store says no to is a refusal; that it does not answer stays what it is."""
    try:
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
