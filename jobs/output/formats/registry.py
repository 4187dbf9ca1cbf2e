"""The formats of parts, by the name that --output-format gives them, which is the ending of their files' names."""

from __future__ import annotations

from gristmill.jobs.output.formats.base import OutputFormat
from gristmill.jobs.output.formats.jsonl import JsonlParts
from gristmill.jobs.output.formats.parquet import ParquetParts

OUTPUT_FORMATS: dict[str, OutputFormat] = {form.name: form for form in (ParquetParts(), JsonlParts())}


def format_of_part(path: str) -> OutputFormat:
    """The format of a part or an attempt, by its name."""
    return OUTPUT_FORMATS[path.rpartition(".")[2]]
