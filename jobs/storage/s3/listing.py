"""Objects of S3 that an input names: one key, a prefix taken as a folder, or a glob over keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.storage.s3.client import s3_client, s3_errors, split_s3_uri
from gristmill.jobs.storage.s3.reader import S3Object, find_object, strip_etag

_MAGIC = re.compile(r"[*?\[]")
_PAGE_KEYS = 1000
_OWN_OUTPUT = ("_attempts", "_manifest.json")


def list_objects(pattern: str, is_wanted: Callable[[str], bool]) -> list[S3Object]:
    """The objects that `pattern` (s3://bucket/...) names; [] when there are none.

    An object of exactly that key comes first, then a glob, then a folder. In a folder, `is_wanted(name)`
    chooses; names that begin with `.` or `_` and folders that hold a job's output are skipped, as on disk. A glob
    that matches a folder stands for what is in it. In a glob `**` alone between slashes crosses folders.
    """
    bucket, key = split_s3_uri(pattern)
    if _MAGIC.search(bucket):
        raise RefusedError(f"input {pattern!r}: name one bucket; a glob is for keys only")
    if key and not key.endswith("/") and (found := find_object(pattern)) is not None:
        return [found]
    if not _MAGIC.search(key):
        folder = key if not key or key.endswith("/") else key + "/"
        return _take_folder(folder, list(list_prefix(bucket, folder)), bucket, is_wanted)
    return _match_glob(bucket, key, is_wanted)


def _match_glob(bucket: str, pattern: str, is_wanted: Callable[[str], bool]) -> list[S3Object]:
    matches = re.compile(_to_regex(pattern.rstrip("/"))).fullmatch
    objects: list[S3Object] = []
    folders: dict[str, list[S3Object]] = {}
    magic = _MAGIC.search(pattern)
    assert magic is not None
    for entry in list_prefix(bucket, pattern[: magic.start()]):
        key = _key_of(entry, bucket)
        if not pattern.endswith("/") and matches(key):
            objects.append(entry)
            continue
        borders = (found.start() for found in re.finditer("/", key))
        folder = next((key[: border + 1] for border in borders if matches(key[:border])), None)
        if folder is not None and not pattern.endswith("**"):
            folders.setdefault(folder, []).append(entry)
    for folder, entries in folders.items():
        objects += _take_folder(folder, entries, bucket, is_wanted)
    return objects


def _take_folder(
    folder: str, entries: list[S3Object], bucket: str, is_wanted: Callable[[str], bool]
) -> list[S3Object]:
    """Of all objects below `folder`, those that are input."""
    outputs: set[str] = set()  # folders below this one that hold a job's output
    paths = [_key_of(entry, bucket)[len(folder) :].split("/") for entry in entries]
    for parts in paths:
        for depth, part in enumerate(parts):
            if depth and part in _OWN_OUTPUT:
                outputs.add("/".join(parts[:depth]))
    chosen = []
    for entry, parts in zip(entries, paths, strict=True):
        is_hidden = any(part[:1] in ("", ".", "_") for part in parts)
        in_output = any("/".join(parts[:depth]) in outputs for depth in range(1, len(parts)))
        if not is_hidden and not in_output and is_wanted(parts[-1]):
            chosen.append(entry)
    return chosen


def _key_of(entry: S3Object, bucket: str) -> str:
    return entry.uri[len("s3://") + len(bucket) + 1 :]


def list_prefix(bucket: str, prefix: str) -> Iterator[S3Object]:
    """All objects below a prefix, without the empty ones that stand for folders."""
    place = f"s3://{bucket}/{prefix}"
    with s3_errors(place, "source"):
        pages = (
            s3_client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=bucket, Prefix=prefix, PaginationConfig={"PageSize": _PAGE_KEYS})
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):
                    uri = f"s3://{bucket}/{entry['Key']}"
                    yield S3Object(uri, int(entry["Size"]), strip_etag(entry["ETag"]))


def _to_regex(pattern: str) -> str:
    """A glob as glob.glob(recursive=True) reads it: wildcards keep within a name and skip hidden ones."""
    names = pattern.split("/")
    regex = ""
    for index, name in enumerate(names):
        is_last = index == len(names) - 1
        if name == "**":
            regex += r"(?:[^./][^/]*/)*" + (r"[^./][^/]*" if is_last else "")
        else:
            regex += _name_to_regex(name) + ("" if is_last else "/")
    return regex


def _name_to_regex(name: str) -> str:
    regex = "" if name[:1] == "." or not _MAGIC.search(name[:1]) else r"(?!\.)"
    index = 0
    while index < len(name):
        letter = name[index]
        index += 1
        close = name.find("]", index + (name[index : index + 1] == "!") + 1) if letter == "[" else -1
        if letter == "*":
            regex += "[^/]*"
        elif letter == "?":
            regex += "[^/]"
        elif close > 0:
            body = name[index:close]
            inverted = body.startswith("!")
            escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", body.removeprefix("!"))
            regex += f"(?!/)[{'^' if inverted else ''}{escaped}]"
            index = close + 1
        else:
            regex += re.escape(letter)
    return regex
