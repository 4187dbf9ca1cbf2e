"""The part of a shard: written as an attempt's own file, which counts only once the database says so.

A shard keeps one part for ever. A later attempt writes a longer one: the earlier rows and its own, in order.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from jobs import part_formats
from jobs.errors import OutputError
from jobs.part_formats import PartRows
from jobs.records import PartFile, ShardClaim
from jobs.results import Result
from jobs.sources import Source
from jobs.storage import LocalStorage

ATTEMPTS_FOLDER = "_attempts"


def part_name(shard_index: int, output_format: str) -> str:
    """The deterministic name of a shard's part."""
    return f"part-{shard_index:05d}.{output_format}"


def write_attempt(
    storage: LocalStorage,
    claim: ShardClaim,
    results: Sequence[Result],
    schema: pa.Schema,
    sources: Sequence[Source],
    output_format: str,
) -> PartFile:
    """Writes `results` (any order) and the rows of claim.part to a new attempt file, synced, not published.

    Raises OutputError when the disk is full or the earlier part is not as committed; then no file is left.
    """
    shard_index = claim.range.shard_index
    name = f"{ATTEMPTS_FOLDER}/{shard_index:05d}-{claim.fence}-{uuid.uuid4().hex[:12]}.{output_format}"
    earlier = settle_part(storage, claim.part) if claim.part else None
    ordered = sorted(results, key=lambda result: result.row_index)
    write = part_formats.write_parquet if output_format == "parquet" else part_formats.write_jsonl
    with storage.create(name) as file:
        num_rows = write(file, ordered, earlier, schema, sources)
    expected = len(ordered) + (claim.part.rows if claim.part else 0)
    assert num_rows == expected, f"{num_rows} rows written, {expected} expected"
    return PartFile(part_name(shard_index, output_format), name, num_rows, file.size, file.sha256)


def load_done_rows(storage: LocalStorage, part: PartFile | None) -> set[int]:
    """The row_index of every row that earlier attempts committed."""
    if part is None:
        return set()
    path = settle_part(storage, part)
    load = part_formats.load_parquet_row_indexes if _is_parquet(part) else part_formats.load_jsonl_row_indexes
    return set(load(path))


def count_part(storage: LocalStorage, part: PartFile) -> PartRows:
    """Rows and error rows of a published part, by its own footer or lines."""
    path = settle_part(storage, part)
    return part_formats.count_parquet(path) if _is_parquet(part) else part_formats.count_jsonl(path)


def settle_part(storage: LocalStorage, part: PartFile) -> Path:
    """Renames a committed attempt to its part name, if nobody did so yet; returns the part's path.

    Whoever claims a shard settles its part before committing a longer one. So no older attempt is left that a
    paused publisher could rename over the longer part: it finds its file gone.
    """
    storage.rename(part.attempt, part.path)
    size = storage.size(part.path)
    if size != part.bytes:
        found = (
            "is missing" if size is None else f"has {size} bytes, not the {part.bytes} that were committed"
        )
        raise OutputError(
            f"{storage.path(part.path)} {found}: put the file back, or start over with --if-exists overwrite"
        )
    return storage.path(part.path)


def _is_parquet(part: PartFile) -> bool:
    return part.path.endswith(".parquet")
