"""The rows of a comparison: read, with the text that people see of each prompt and the language it is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.input.reading import load_columns, load_rows
from gristmill.jobs.input.sources import load_sources
from gristmill.jobs.plan.cutting import plan_shards
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.row_errors import RowError, SkipRow
from gristmill.jobs.rows import Row
from gristmill.jobs.source import Source
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.values import has_lone_surrogate, to_json_text
from gristmill.worker.tools.compare.languages import UNKNOWN, detect_language


@dataclass(frozen=True, slots=True)
class CompareRow:
    """One row. prompt: its messages' text; language: a column's value, or detected; fault: why it has no prompt."""

    row: Row
    prompt: str
    language: str
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class CompareRows:
    """All rows, and what is needed to make prompts of them."""

    spec: JobSpec
    sources: Sequence[Source]
    prompt_source: PromptSource
    rows: Sequence[CompareRow]


def load_compare_rows(spec: JobSpec, language: str | None) -> CompareRows:
    """The rows of the spec's input, up to its limit. language: a column; None: detected.

    RefusedError for files and columns that aren't there, a template that can't be compiled, and for no rows.
    """
    sources = load_sources(spec.input, spec.input_format)
    available = load_columns(sources)
    prompt_source = PromptSource(spec, available)
    if language is not None and available and language not in available:
        names = ", ".join(sorted(available)[:30])
        raise RefusedError(f"--language {language!r}: no such column; the columns are {names}")
    columns = prompt_source.columns | ({language} if language is not None else frozenset())
    rows = [
        build_row(row, prompt_source, language)
        for shard in plan_shards(sources, limit=spec.limit).shards
        for batch in load_rows(sources[shard.source_index], shard, columns)
        for row in batch
    ]
    if not rows:
        raise RefusedError(f"{', '.join(spec.input)}: no rows to compare; give a file that has some")
    if all(row.fault is not None for row in rows):
        raise RefusedError(f"no row can become a prompt; the first: {rows[0].fault}")
    return CompareRows(spec, sources, prompt_source, rows)


def build_row(row: Row, prompt_source: PromptSource, language: str | None) -> CompareRow:
    """The row with its prompt as text; a row at fault has none, and says why when it is to run."""
    label = None if language is None else to_label((row.values or {}).get(language))
    try:
        if row.values is None:
            raise row.error or AssertionError("a row without values has an error")
        messages = prompt_source.build(row.values)
    except (RowError, SkipRow) as fault:
        return CompareRow(row, "", label or UNKNOWN, str(fault))
    asked = [message["content"] or "" for message in messages if message["role"] == "user"]
    detected = detect_language(asked[-1]) if asked and label is None else UNKNOWN
    return CompareRow(row, to_shown_text(messages), label or detected)


def to_shown_text(messages: Sequence[dict[str, Any]]) -> str:
    """A prompt for people: its text alone, or each message under its role."""
    if len(messages) == 1:
        return messages[0]["content"] or ""
    return "\n\n".join(f"{message['role']}: {message['content'] or ''}" for message in messages)


def to_label(value: Any) -> str:
    """A column's value as the name of a group; nothing and empty text are unknown."""
    if value is None or value != value:
        return UNKNOWN
    text = value if isinstance(value, str) else to_json_text(value)
    if has_lone_surrogate(text):
        text = text.encode("utf-8", "replace").decode()
    return " ".join(text.split())[:40] or UNKNOWN
