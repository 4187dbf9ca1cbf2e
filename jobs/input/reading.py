"""The rows and the columns of sources, whatever their format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from gristmill.jobs.errors import SourceError
from gristmill.jobs.input.files import map_inputs, stat_input
from gristmill.jobs.input.formats.registry import format_of
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source
from gristmill.jobs.storage.folder import is_s3

MAX_SAMPLE_RECORDS = 1000
_MIN_SAMPLE_RECORDS = 50
_ALL_SAMPLE_RECORDS = 20_000
_MAX_SAMPLE_SOURCES = 256


def load_rows(source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
    """The rows of one shard, in input order, in batches of at most 512 rows and a bounded number of bytes.

    `columns` (and custom_id, where there is one) are what a row of a typed format holds; others hold all their
    keys. Rows that can't be read are Rows with an error. SourceError when the file is not as planned: what
    was planned is never guessed.
    """
    _check_unchanged(source)
    if shard.num_rows == 0:
        return iter(())
    return format_of(source).load_rows(source, shard, columns)


def load_columns(sources: Sequence[Source]) -> dict[str, Any]:
    """The columns of all sources: name -> Arrow type, or None where the values may have any type (JSONL).

    Scanned formats: the keys of a sample from each file's start (1000 records, 1 MiB), of many files from some. Typed
    ones: every footer, for a type must hold for all; types that differ are widened to one that holds both; None when
    there is none. Empty when nothing is known: no rows, or none that can be parsed.
    """
    scanned = [source for source in sources if format_of(source).is_scanned]
    step = -(-len(scanned) // _MAX_SAMPLE_SOURCES) or 1
    sampled = list(dict.fromkeys([*scanned[::step], *scanned[-1:]]))
    per_file = _ALL_SAMPLE_RECORDS // max(1, len(sampled))
    num_records = max(_MIN_SAMPLE_RECORDS, min(MAX_SAMPLE_RECORDS, per_file))
    typed = [source for source in sources if not format_of(source).is_scanned]
    columns: dict[str, Any] = {}
    for found in map_inputs(
        lambda source: format_of(source).load_columns(source, num_records),
        sorted([*sampled, *typed], key=lambda source: source.uri),
    ):
        for name, kind in found.items():
            columns[name] = _widen(columns[name], kind) if name in columns else kind
    return columns


def is_typed(sources: Sequence[Source]) -> bool:
    """Whether every column has a type in all of these sources."""
    return not any(format_of(source).is_scanned for source in sources)


def _check_unchanged(source: Source) -> None:
    if is_s3(source.uri):
        return  # every request names the version
    if stat_input(source.uri) != (source.size_bytes, source.version):
        raise SourceError(f"{source.uri!r} changed since the job was planned; restore it, or start a new job")


def _widen(left: Any, right: Any) -> Any:
    if left is None or right is None or left == right:
        return left if left == right else None
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (left, right)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("column").type
    except pa.ArrowException:
        return None
