"""The rows and the columns of sources, whatever their format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input.bytestream import BLOCK_BYTES, BYTE_ORDER_MARK, ByteStream
from gristmill.jobs.input.files import is_s3, map_inputs, refuse_unreadable, stat_input
from gristmill.jobs.input.footers import open_parquet
from gristmill.jobs.input.formats.jsonl import (
    MAX_LINE_BYTES,
    OverlongLine,
    iterate_lines,
    load_jsonl_rows,
    parse_record,
)
from gristmill.jobs.input.formats.parquet import load_parquet_rows
from gristmill.jobs.row_errors import RowError
from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source

MAX_SAMPLE_RECORDS = 1000
_MIN_SAMPLE_RECORDS = 50
_ALL_SAMPLE_RECORDS = 20_000
_MAX_SAMPLE_SOURCES = 256
_SAMPLE_BLOCK_BYTES = 64 << 10


def load_rows(source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
    """The rows of one shard, in input order, in batches of at most 512 rows and a bounded number of bytes.

    `columns` (and custom_id, where there is one) are what a Parquet row holds; a JSONL row holds all its
    keys. Rows that can't be read are Rows with an error. SourceError when the file is not as planned: what
    was planned is never guessed.
    """
    _check_unchanged(source)
    if shard.num_rows == 0:
        return iter(())
    if source.format == "parquet":
        return load_parquet_rows(source, shard, {*columns, "custom_id"})
    return load_jsonl_rows(source, shard)


def load_columns(sources: Sequence[Source]) -> dict[str, Any]:
    """The columns of all sources: name -> Arrow type, or None where the values may have any type (JSONL).

    JSONL: the keys of a sample from each file's start (1000 records, 1 MiB), of many files from some. Parquet:
    every footer, for a type must hold for all; types that differ are widened to one that holds both; None when
    there is none. Empty when nothing is known: no rows, or none that can be parsed.
    """
    jsonl = [source for source in sources if source.format == "jsonl"]
    step = -(-len(jsonl) // _MAX_SAMPLE_SOURCES) or 1
    sampled = list(dict.fromkeys([*jsonl[::step], *jsonl[-1:]]))
    per_file = _ALL_SAMPLE_RECORDS // max(1, len(sampled))
    num_records = max(_MIN_SAMPLE_RECORDS, min(MAX_SAMPLE_RECORDS, per_file))
    parquet = [source for source in sources if source.format == "parquet"]
    load = partial(_load_source_columns, num_records=num_records)
    columns: dict[str, Any] = {}
    for found in map_inputs(load, sorted([*sampled, *parquet], key=lambda source: source.uri)):
        for name, kind in found.items():
            columns[name] = _widen(columns[name], kind) if name in columns else kind
    return columns


def _load_source_columns(source: Source, num_records: int) -> dict[str, Any]:
    if source.format == "parquet":
        return _load_parquet_columns(source)
    return dict.fromkeys(_load_jsonl_keys(source, num_records))


def _check_unchanged(source: Source) -> None:
    if is_s3(source.uri):
        return  # every request names the version
    if stat_input(source.uri) != (source.size_bytes, source.version):
        raise SourceError(f"{source.uri!r} changed since the job was planned; restore it, or start a new job")


def _load_parquet_columns(source: Source) -> dict[str, Any]:
    with open_parquet(source) as file:
        schema = file.schema_arrow
    if len(set(schema.names)) != len(schema.names):
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        raise RefusedError(f"{source.uri!r} has several columns named {twice[0]!r}; rename them")
    return dict(zip(schema.names, schema.types, strict=True))


def _load_jsonl_keys(source: Source, num_records: int) -> list[str]:
    try:
        stream = ByteStream(source)
        try:
            return list(_sample_keys(source.name, stream, num_records))
        finally:
            stream.close()
    except SourceError as error:
        raise refuse_unreadable(error) from None


def _sample_keys(name: str, stream: ByteStream, num_records: int) -> dict[str, None]:
    """Keys of the first records; reads on after 1 MiB only while it has found none."""
    keys: dict[str, None] = {}
    row_index = 0
    for lines in iterate_lines(stream, MAX_LINE_BYTES + BLOCK_BYTES, _SAMPLE_BLOCK_BYTES):
        for line in lines[: num_records - row_index]:
            if not isinstance(line, OverlongLine):
                try:
                    record = parse_record(name, row_index, line.removeprefix(BYTE_ORDER_MARK))
                except RowError:
                    continue  # the row itself reports it, when it is read
                keys.update(dict.fromkeys(record))
        row_index += len(lines)
        if row_index >= num_records or (keys and stream.position >= BLOCK_BYTES):
            break
    return keys


def _widen(left: Any, right: Any) -> Any:
    if left is None or right is None or left == right:
        return left if left == right else None
    try:
        schemas = [pa.schema([("column", kind)]) for kind in (left, right)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("column").type
    except pa.ArrowException:
        return None
