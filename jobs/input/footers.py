"""What the footers of Parquet sources say: schema, rows, sizes. No row is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.jobs.errors import RefusedError, SourceError
from gristmill.jobs.input.files import open_input, refuse_unreadable
from gristmill.jobs.source import Source

PARQUET_ERRORS = (pa.ArrowException, OSError)
_STREAM_BYTES = 1 << 20


@contextmanager
def open_parquet(source: Source) -> Iterator[Any]:
    """An open ParquetFile: its footer is read. RefusedError when that can't be done."""
    try:
        with open_input(source.uri, source.version, source.size_bytes) as file:
            yield open_parquet_file(file)
    except PARQUET_ERRORS as error:
        raise RefusedError(
            f"can't read {source.uri!r} as Parquet: {error}; replace the damaged file"
        ) from None
    except SourceError as error:
        raise refuse_unreadable(error) from None


def open_parquet_file(file: Any) -> Any:
    """A ParquetFile that streams its columns instead of holding a row group."""
    return pq.ParquetFile(file, buffer_size=_STREAM_BYTES, pre_buffer=False, coerce_int96_timestamp_unit="us")


def load_num_rows(source: Source) -> int:
    """The rows of a Parquet file. RefusedError when it is not a whole Parquet file."""
    with open_parquet(source) as file:
        return int(file.metadata.num_rows)


def load_row_bytes(source: Source) -> float:
    """The mean size of a row of a Parquet file, decompressed. RefusedError as in load_num_rows."""
    with open_parquet(source) as file:
        metadata = file.metadata
        num_bytes = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        return float(num_bytes / max(1, metadata.num_rows))
