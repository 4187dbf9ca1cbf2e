"""Which files a job reads: inputs (files, globs, folders) expanded, made absolute, deduplicated, sorted by
URI.

Local files only. The format comes from the file's name or --input-format, the compression from its first
bytes.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.errors import RefusedError

Format = Literal["jsonl", "parquet"]
Compression = Literal["gzip", "zstd"]

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".ndjson": "jsonl",
    ".ndjson.gz": "jsonl",
    ".ndjson.zst": "jsonl",
    ".parquet": "parquet",
}
_OWN_OUTPUT = ("_attempts", "_manifest.json")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. `version` changes when the file does (mtime in ns); `compression` None is none."""

    uri: str
    size_bytes: int
    version: str
    format: Format
    compression: Compression | None = None

    @property
    def name(self) -> str:
        """The file's own name, for messages."""
        return os.path.basename(self.uri)


def load_sources(
    inputs: Sequence[str],
    input_format: Literal["auto", "jsonl", "parquet"] = "auto",
    output: str | None = None,
) -> list[Source]:
    """All files that `inputs` name, sorted by URI; their order is the `source_index` of every row.

    Folders are walked for known extensions (links to folders are not followed; names that start with `.` or
    `_` and folders that hold another job's output are skipped). Files below `output` are never input.
    RefusedError for a pattern without a match, a file that can't be read, or one whose format can't be known.
    """
    own = os.path.abspath(output) + os.sep if output else None
    paths: set[str] = set()
    for pattern in inputs:
        found = {os.path.abspath(path) for path in _expand(pattern, input_format)}
        outside = {path for path in found if own is None or not path.startswith(own)}
        if found and not outside:
            raise RefusedError(
                f"input {pattern!r} is in the job's own output folder; choose another --output"
            )
        if not found:
            raise RefusedError(_no_match(pattern))
        paths |= outside
    return [load_source(path, input_format) for path in sorted(paths)]


def load_source(path: str, input_format: Literal["auto", "jsonl", "parquet"] = "auto") -> Source:
    """What one file is. RefusedError when it can't be read or its format can't be known."""
    file_format = _known_format(path) if input_format == "auto" else input_format
    if file_format is None:
        raise RefusedError(
            f"can't tell the format of {path!r} from its name; say --input-format jsonl or parquet"
        )
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise RefusedError(f"the file name {path!r} is not valid UTF-8; rename the file") from None
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"input {path!r} is not a regular file; write it to a file first")
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise RefusedError(f"can't read input {path!r}: {error.strerror}") from None
    compression = _known_compression(magic) if file_format == "jsonl" else None
    return Source(path, status.st_size, str(status.st_mtime_ns), file_format, compression)


def _expand(pattern: str, input_format: str) -> Iterator[str]:
    if "://" in pattern and not pattern.startswith("file://"):
        raise RefusedError(f"input {pattern!r}: only local files can be read; copy it here first")
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
    if os.path.isdir(pattern):
        return (
            f"input folder {pattern!r} holds no file named {', '.join('*' + suffix for suffix in _SUFFIXES)}"
        )
    if glob.has_magic(pattern):
        return f"input {pattern!r} matches no file"
    return f"input {pattern!r}: no such file or folder"


def _known_format(path: str) -> Format | None:
    name = path.lower()
    return next((form for suffix, form in _SUFFIXES.items() if name.endswith(suffix)), None)


def _known_compression(magic: bytes) -> Compression | None:
    if magic[:2] == b"\x1f\x8b":
        return "gzip"
    if magic == b"\x28\xb5\x2f\xfd" or (
        len(magic) == 4 and magic[0] & 0xF0 == 0x50 and magic[1:] == b"\x2a\x4d\x18"
    ):
        return "zstd"
    return None
