"""What Gristmill asks of a format of input. To add one: a file beside this with FORMAT, and its name in formats.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.jobs.rows import Row
from gristmill.jobs.source import ShardRange, Source


class RecordEnds(NamedTuple):
    """Where each record ends (after its newline) in the decompressed stream, and whether it is a row."""

    ends: NDArray[np.int64]
    is_row: NDArray[np.bool_]


class InputFormat(ABC):
    """One way in which rows lie in files.

    Where `is_scanned`, rows are found by a scan of the bytes, which may be compressed, and a row may hold values of any
    type; else a footer tells how many rows there are and the type of each column.
    """

    name: str
    suffixes: tuple[str, ...]
    is_scanned: bool
    max_windows: int | None = None  # of a sample, where to begin in the middle of a file costs much

    @abstractmethod
    def load_columns(self, source: Source, num_records: int) -> Mapping[str, Any]:
        """Name -> Arrow type of each column, or None for any type: by the footer, else by the first records."""

    @abstractmethod
    def load_rows(self, source: Source, shard: ShardRange, columns: Collection[str]) -> Iterator[list[Row]]:
        """The rows of one range in batches; of typed ones at least `columns`. SourceError: not as planned."""

    def count_rows(self, source: Source) -> int:
        """By the footer. RefusedError when the file is not whole."""
        raise AssertionError(f"{self.name} has no footer")

    def load_row_bytes(self, source: Source) -> float:
        """The mean size of a row, decompressed, by the footer. RefusedError as in count_rows."""
        raise AssertionError(f"{self.name} has no footer")

    def scan_records(self, source: Source, begin: int = 0, end: int | None = None) -> Iterator[RecordEnds]:
        """The ends of the records that begin in the bytes [begin, end) of the decompressed stream, by chunks.

        `begin` must be the beginning of a record; the last one may end beyond `end`. SourceError when the source
        can't be read or decompressed.
        """
        raise AssertionError(f"{self.name} is not scanned")

    def find_record(self, source: Source, begin: int, end: int) -> int | None:
        """Where the first record begins that begins in the bytes [begin, end) of a plain source; None: none does."""
        raise AssertionError(f"{self.name} is not scanned")
