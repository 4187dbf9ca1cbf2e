"""Which files a job reads: inputs (files, globs, folders) expanded, made absolute, deduplicated, sorted by
URI.

Local files and objects of S3. The format comes from the file's name or --input-format, the compression from
its first bytes.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input.files import InputStat, map_inputs, open_input, refuse_unreadable, stat_input
from gristmill.jobs.input.formats.registry import INPUT_FORMATS, SUFFIXES
from gristmill.jobs.source import Compression, Source
from gristmill.jobs.storage.folder import is_s3

_OWN_OUTPUT = ("_attempts", "_manifest.json")


def load_sources(
    inputs: Sequence[str],
    input_format: str = "auto",
    output: str | None = None,
) -> list[Source]:
    """All files that `inputs` name, sorted by URI; their order is the `source_index` of every row.

    Folders are walked for known extensions (links to folders are not followed; names that start with `.` or
    `_` and folders that hold another job's output are skipped). Files below `output` are never input.
    RefusedError for a pattern without a match, a file that can't be read, or one whose format can't be known.
    """
    own = _as_folder(output) if output else None
    stats: dict[str, InputStat] = {}
    uris: set[str] = set()
    for pattern in inputs:
        found: set[str] = set()
        if is_s3(pattern):
            listed = _list(pattern, input_format)
            stats |= listed
            found |= listed.keys()
        else:
            found |= {os.path.abspath(path) for path in _expand(pattern, input_format)}
        outside = {uri for uri in found if own is None or not uri.startswith(own)}
        if found and not outside:
            raise RefusedError(
                f"input {pattern!r} is in the job's own output folder; choose another --output"
            )
        if not found:
            raise RefusedError(_no_match(pattern))
        uris |= outside
    load = partial(_load_found, stats=stats, input_format=input_format)
    return list(map_inputs(load, sorted(uris)))


def load_source(uri: str, input_format: str = "auto") -> Source:
    """What one file is. RefusedError when it can't be read or its format can't be known."""
    return _load_found(uri, {}, input_format)


def _load_found(uri: str, stats: Mapping[str, InputStat], input_format: str) -> Source:
    """A source; `stats` tells of those that a listing showed."""
    file_format = _known_format(uri) if input_format == "auto" else input_format
    if file_format is None:
        raise RefusedError(
            f"can't tell the format of {uri!r} from its name; say --input-format {' or '.join(INPUT_FORMATS)}"
        )
    try:
        uri.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(f"the file name {uri!r} is not valid UTF-8; rename the file") from None
    try:
        size_bytes, version = stats.get(uri) or stat_input(uri)
        compression: Compression | None = None
        can_be_compressed = INPUT_FORMATS[file_format].is_scanned
        if not is_s3(uri) or (can_be_compressed and size_bytes):
            with open_input(uri, version, size_bytes) as file:
                magic = file.read(4)
            compression = _known_compression(magic) if can_be_compressed else None
    except SourceError as error:
        raise refuse_unreadable(error) from None
    except OSError as error:
        raise RefusedError(f"can't read input {uri!r}: {error.strerror}") from None
    return Source(uri, size_bytes, version, file_format, compression)


def _as_folder(output: str) -> str:
    """What every file in a job's output begins with."""
    return output.rstrip("/") + "/" if "://" in output else os.path.abspath(output) + os.sep


def _list(pattern: str, input_format: str) -> dict[str, InputStat]:
    from gristmill.jobs.storage.s3.listing import (
        list_objects,  # with boto3: only who reads from S3 waits for it
    )

    def is_wanted(name: str) -> bool:
        known = _known_format(name)
        return known is not None and input_format in ("auto", known)

    try:
        listed = list_objects(pattern, is_wanted)
        return {entry.uri: InputStat(entry.size_bytes, entry.version) for entry in listed}
    except SourceError as error:
        raise refuse_unreadable(error) from None


def _expand(pattern: str, input_format: str) -> Iterator[str]:
    if "://" in pattern and not pattern.startswith("file://"):
        raise RefusedError(f"input {pattern!r}: only local files and s3:// can be read; copy it there first")
    pattern = pattern.removeprefix("file://")
    if os.path.isdir(pattern):
        yield from _walk(pattern, input_format)
    elif os.path.lexists(pattern):
        yield pattern
    elif glob.has_magic(pattern):
        for path in glob.iglob(pattern, recursive=True):
            if not os.path.isdir(path):
                yield path
            elif not pattern.endswith("**"):
                yield from _walk(path, input_format)


def _walk(folder: str, input_format: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        if parent != folder and any(name in folders or name in files for name in _OWN_OUTPUT):
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] not in "._"]
        for name in files:
            known = _known_format(name)
            if name[0] not in "._" and known is not None and input_format in ("auto", known):
                yield os.path.join(parent, name)


def _no_match(pattern: str) -> str:
    if is_s3(pattern) and not glob.has_magic(pattern):
        names = ", ".join("*" + suffix for suffix in SUFFIXES)
        return f"input {pattern!r}: no such object, and no folder with a file named {names}"
    if os.path.isdir(pattern):
        return (
            f"input folder {pattern!r} holds no file named {', '.join('*' + suffix for suffix in SUFFIXES)}"
        )
    if glob.has_magic(pattern):
        return f"input {pattern!r} matches no file"
    return f"input {pattern!r}: no such file or folder"


def _known_format(path: str) -> str | None:
    name = path.lower()
    return next((form for suffix, form in SUFFIXES.items() if name.endswith(suffix)), None)


def _known_compression(magic: bytes) -> Compression | None:
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (
        len(magic) == 4 and magic[0] & 0xF0 == 0x50 and magic[1:] == b"\x2a\x4d\x18"
    ):
        return "zstd"
    return None
