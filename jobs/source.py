"""Where rows lie: a source file, a contiguous range of its rows, and the ranges of a whole job."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

Compression = Literal["gzip", "zstd"]


@dataclass(frozen=True, slots=True)
class Source:
    """One input file, by absolute path or s3:// URI. `compression` None is none.

    `version` changes when the file does: its mtime in ns, or its ETag.
    """

    uri: str
    size_bytes: int
    version: str
    format: str  # a name of jobs/formats.py
    compression: Compression | None = None

    @property
    def name(self) -> str:
        """The file's own name, for messages."""
        return os.path.basename(self.uri)


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A contiguous range of one source. Bytes are of the decompressed stream; 0 where a footer counts rows."""

    shard_index: int
    source_index: int
    first_row: int  # row_index of the first record
    num_rows: int  # rows, blank JSONL records not counted
    num_records: int  # records that were scanned, blank ones counted; else num_rows
    byte_offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class PlanPiece:
    """What one worker plans at once: the bytes [byte_offset, byte_offset + byte_size) of a source."""

    source_index: int
    byte_offset: int
    byte_size: int  # 0: the whole source


@dataclass(frozen=True, slots=True)
class Plan:
    """All shards of a job, in input order; together they hold `num_rows` rows."""

    shards: tuple[ShardRange, ...]
    num_rows: int
