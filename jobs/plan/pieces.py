"""Planning a large job by pieces, which any number of workers cut into shards at the same time.

A piece is a source, or a byte range of a plain scanned source; a range owns the records that begin in it. Joined,
the pieces hold the same rows as plan_shards finds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, replace

from gristmill.jobs.input.formats.registry import format_of
from gristmill.jobs.plan.cutting import plan_range
from gristmill.jobs.source import Plan, PlanPiece, ShardRange, Source

PIECE_BYTES = 256 << 20
MAX_INLINE_SOURCES = 8
MAX_INLINE_BYTES = 256 << 20


def is_large(sources: Sequence[Source], limit: int | None = None) -> bool:
    """Whether planning is work for several workers. A limit counts rows over all sources: one must plan it."""
    if limit is not None:
        return False
    num_bytes = sum(source.size_bytes for source in sources if format_of(source).is_scanned)
    return len(sources) > MAX_INLINE_SOURCES or num_bytes > MAX_INLINE_BYTES


def cut_pieces(sources: Sequence[Source], piece_bytes: int = PIECE_BYTES) -> list[PlanPiece]:
    """The pieces of all sources, in input order."""
    pieces = []
    for source_index, source in enumerate(sources):
        is_plain = format_of(source).is_scanned and source.compression is None
        if is_plain and source.size_bytes > piece_bytes:
            for offset in range(0, source.size_bytes, piece_bytes):
                size = min(piece_bytes, source.size_bytes - offset)
                pieces.append(PlanPiece(source_index, offset, size))
        else:
            pieces.append(PlanPiece(source_index, 0, 0))
    return pieces


def plan_piece(source: Source, piece: PlanPiece, shard_rows: int) -> list[ShardRange]:
    """The shards of a piece: shard_index and first_row count from its start, byte_offset from the source's.

    Their records are all records of the piece, so that join_pieces can number the rows: a piece that has blank
    records only has one shard without rows. RefusedError for a source that is damaged.
    """
    end = piece.byte_offset + piece.byte_size if piece.byte_size else None
    return plan_range(source, piece.source_index, shard_rows, piece.byte_offset, end)


def join_pieces(pieces: Sequence[PlanPiece], results: Sequence[Sequence[ShardRange]]) -> Plan:
    """The plan of the whole job; `results` holds what plan_piece gave for each piece."""
    shards: list[ShardRange] = []
    source_index, first_row = -1, 0
    for piece, ranges in zip(pieces, results, strict=True):
        if piece.source_index != source_index:
            source_index, first_row = piece.source_index, 0
        for found in ranges:
            if found.num_rows:
                first = first_row + found.first_row
                shards.append(replace(found, shard_index=len(shards), first_row=first))
        first_row += sum(found.num_records for found in ranges)
    shards = shards or [ShardRange(0, 0, 0, 0, 0, 0, 0)]
    return Plan(tuple(shards), sum(shard.num_rows for shard in shards))


def ranges_to_json(ranges: Sequence[ShardRange]) -> str:
    """Ranges as compact JSON text."""
    return json.dumps([astuple(found) for found in ranges], separators=(",", ":"))


def ranges_from_json(text: str) -> list[ShardRange]:
    """The inverse of ranges_to_json."""
    return [ShardRange(*values) for values in json.loads(text)]
