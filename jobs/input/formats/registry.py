"""The formats of input, by the name that --input-format gives them and by the endings of files' names."""

from __future__ import annotations

from gristmill.jobs.input.formats.base import InputFormat
from gristmill.jobs.input.formats.jsonl import JsonlFormat
from gristmill.jobs.input.formats.parquet import ParquetFormat
from gristmill.jobs.source import Source

INPUT_FORMATS: dict[str, InputFormat] = {form.name: form for form in (JsonlFormat(), ParquetFormat())}
SUFFIXES = {suffix: form.name for form in INPUT_FORMATS.values() for suffix in form.suffixes}


def format_of(source: Source) -> InputFormat:
    """The format of a source."""
    return INPUT_FORMATS[source.format]
