"""The formats of parts, by the name that --output-format gives them, which is the ending of their files' names."""

from __future__ import annotations

from importlib import import_module
from typing import get_args

from gristmill.jobs.formats import OutputFormatName
from gristmill.jobs.output.formats.base import OutputFormat

OUTPUT_FORMATS: dict[str, OutputFormat] = {
    name: import_module(f"gristmill.jobs.output.formats.{name}").FORMAT for name in get_args(OutputFormatName)
}


def format_of_part(path: str) -> OutputFormat:
    """The format of a part or an attempt, by its name."""
    return OUTPUT_FORMATS[path.rpartition(".")[2]]
