"""What Gristmill asks of a format of parts. To add one: a file beside this with FORMAT, and its name in formats.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from gristmill.jobs.results import Result
from gristmill.jobs.source import Source
from gristmill.jobs.storage.hashing_file import HashingFile

TOKEN_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens")


class PartRows(NamedTuple):
    """What a part file says of itself."""

    rows: int
    errors: int


@dataclass(slots=True)
class StrippedRows:
    """What a part lost when its error rows were left out. Mutable while counting."""

    num_kept: int = 0
    errors_by_code: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_COLUMNS, 0))

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Counts error rows."""
        for row in rows:
            code = row["error_code"]
            self.errors_by_code[code] = self.errors_by_code.get(code, 0) + 1
            for name in TOKEN_COLUMNS:
                self.tokens[name] += row[name] or 0


class OutputFormat(ABC):
    """One way in which the rows of a part lie in its file: in row order, of one schema."""

    name: str  # and the ending of the parts' names
    dataset_format: str  # what pyarrow.dataset calls it
    has_footer: bool  # that tells of the rows without reading them

    @abstractmethod
    def write(
        self,
        file: HashingFile,
        results: Sequence[Result],
        earlier: BinaryIO | None,
        schema: pa.Schema,
        sources: Sequence[Source],
    ) -> int:
        """Writes `results` (in row order) merged with the earlier part in a stream; the number of rows."""

    @abstractmethod
    def strip(self, file: HashingFile, earlier: BinaryIO, schema: pa.Schema) -> StrippedRows:
        """Writes the earlier part without its error rows; says what was left out."""

    @abstractmethod
    def load_keys(self, part: BinaryIO, only_errors: bool) -> Iterator[tuple[str, int]]:
        """(source, row_index) of every row, or of every error row."""

    @abstractmethod
    def count(self, part: BinaryIO) -> PartRows:
        """Rows and error rows."""
