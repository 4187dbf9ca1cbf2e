"""Parts as JSON lines: one object a line, keys in the schema's order."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa

from gristmill.jobs.output.formats.base import OutputFormat, PartRows, StrippedRows
from gristmill.jobs.output.schema import holds_json, kept_fields
from gristmill.jobs.results import Result
from gristmill.jobs.source import Source
from gristmill.jobs.storage.hashing_file import HashingFile
from gristmill.jobs.values import encode_text, to_json_text, to_plain

# error_code and error_message are the last columns, so a line of a completion ends with exactly this.
_NO_ERROR_TAIL = b'"error_code": null, "error_message": null}\n'


class JsonlParts(OutputFormat):
    """No footer: rows are counted by the ends of their lines."""

    name = "jsonl"
    dataset_format = "json"
    has_footer = False

    def write(
        self,
        file: HashingFile,
        results: Sequence[Result],
        earlier: BinaryIO | None,
        schema: pa.Schema,
        sources: Sequence[Source],
    ) -> int:
        num_rows, last = 0, ("", -1)
        lines = heapq.merge(_read_lines(earlier or ()), _build_lines(results, schema, sources))
        for key, line in lines:
            assert key > last, f"row {key[1]} is in the earlier part and in the new rows"
            file.write(line)
            num_rows, last = num_rows + 1, key
        return num_rows

    def strip(self, file: HashingFile, earlier: BinaryIO, schema: pa.Schema) -> StrippedRows:
        stripped = StrippedRows()
        for line in earlier:
            if line.endswith(_NO_ERROR_TAIL):
                file.write(line)
                stripped.num_kept += 1
            else:
                stripped.add([json.loads(line)])
        return stripped

    def load_keys(self, part: BinaryIO, only_errors: bool) -> Iterator[tuple[str, int]]:
        lines = (line for line in part if not (only_errors and line.endswith(_NO_ERROR_TAIL)))
        return (key for key, _ in _read_lines(lines))

    def count(self, part: BinaryIO) -> PartRows:
        rows = completions = 0
        for line in part:
            rows += 1
            completions += line.endswith(_NO_ERROR_TAIL)
        return PartRows(rows, rows - completions)


def _read_lines(lines: Iterable[bytes]) -> Iterator[tuple[tuple[str, int], bytes]]:
    for line in lines:
        record = json.loads(line)
        yield (record["source"], record["row_index"]), line


def _build_lines(
    results: Iterable[Result], schema: pa.Schema, sources: Sequence[Source]
) -> Iterator[tuple[tuple[str, int], bytes]]:
    kept = [(field.name, holds_json(field)) for field in kept_fields(schema)]
    names = schema.names[3 + len(kept) :]
    for result in results:
        record: dict[str, Any] = {
            "source": sources[result.source_index].uri,
            "row_index": result.row_index,
            "custom_id": result.custom_id,
        }
        for index, (name, as_json) in enumerate(kept):
            value = result.kept[index] if index < len(result.kept) else None
            record[name] = to_json_text(value) if as_json and value is not None else to_plain(value)
        for name in names:
            record[name] = getattr(result, name)
        line = encode_text(json.dumps(record, ensure_ascii=False, allow_nan=False)) + b"\n"
        yield (record["source"], result.row_index), line


FORMAT = JsonlParts()
