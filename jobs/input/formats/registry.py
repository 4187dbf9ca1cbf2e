"""The formats of input, by the name that --input-format gives them and by the endings of files' names."""

from __future__ import annotations

from importlib import import_module
from typing import get_args

from gristmill.jobs.formats import InputFormatName
from gristmill.jobs.input.formats.base import InputFormat
from gristmill.jobs.source import Source

_NAMES = [name for name in get_args(InputFormatName) if name != "auto"]
INPUT_FORMATS: dict[str, InputFormat] = {
    name: import_module(f"gristmill.jobs.input.formats.{name}").FORMAT for name in _NAMES
}
SUFFIXES = {suffix: form.name for form in INPUT_FORMATS.values() for suffix in form.suffixes}


def format_of(source: Source) -> InputFormat:
    """The format of a source."""
    return INPUT_FORMATS[source.format]
