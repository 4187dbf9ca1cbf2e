"""One input row, before it becomes a request. Its identity is (source_index, row_index), not its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gristmill.jobs.row_errors import RowError
from gristmill.jobs.values import to_json_text


@dataclass(frozen=True, slots=True)
class Row:
    """One input row: `values` by column name, or the `error` that reading it gave (then values is None).

    row_index is 0-based in its source; in JSONL it is the ordinal among newline-terminated records, blank
    ones counted.
    """

    source_index: int
    row_index: int
    values: dict[str, Any] | None
    error: RowError | None = None

    @property
    def custom_id(self) -> str | None:
        """The user's own id, as text.

        A string stays as it is (also an empty one), an integer is written in decimal, null or no column is
        None, anything else is its JSON text. Lone surrogates become U+FFFD: the text must be storable.
        """
        if self.values is None:
            return None
        value = self.values.get("custom_id")
        if value is None or value != value:
            return None
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        text = value if isinstance(value, str) else to_json_text(value)
        if text.isascii():
            return text
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
