"""The one Arrow schema that all parts of a job share, fixed at planning."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa

from gristmill.jobs.errors import RefusedError

_BEFORE_KEPT = {"source": pa.string(), "row_index": pa.int64(), "custom_id": pa.string()}
_AFTER_KEPT = {
    "completion": pa.string(),
    "finish_reason": pa.string(),
    "prompt_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "cached_tokens": pa.int32(),
    "error_code": pa.string(),
    "error_message": pa.string(),
}
_JSON_MARK = {b"gristmill": b"json"}


def build_part_schema(
    keep: Collection[str], input_columns: Mapping[str, pa.DataType | None], are_typed: bool
) -> pa.Schema:
    """The output columns; kept ones after the ids, of their own type where all inputs have types, else as JSON text.

    `input_columns` empty: nothing is known of the rows, so any column is accepted.
    """
    for name in keep:
        if name in _BEFORE_KEPT or name in _AFTER_KEPT:
            raise RefusedError(
                f"--keep {name}: the output has a column of that name; rename the input's, or don't keep it"
            )
        if input_columns and name not in input_columns:
            raise RefusedError(
                f"--keep {name}: no such column; there are: {', '.join(sorted(input_columns))}"
            )
    kept = [_kept_field(name, input_columns.get(name), are_typed) for name in dict.fromkeys(keep)]
    return pa.schema([*map(pa.field, *_columns(_BEFORE_KEPT)), *kept, *map(pa.field, *_columns(_AFTER_KEPT))])


def kept_fields(schema: pa.Schema) -> list[pa.Field]:
    """The fields of --keep, in its order."""
    return list(schema)[len(_BEFORE_KEPT) : len(schema) - len(_AFTER_KEPT)]


def holds_json(field: pa.Field) -> bool:
    """Whether this kept column holds JSON text of values that have no Arrow type."""
    return bool(field.metadata and _JSON_MARK.items() <= field.metadata.items())


def load_part_schema(data: bytes) -> pa.Schema:
    """The schema that JobRecord.part_schema holds."""
    return pa.ipc.read_schema(pa.py_buffer(data))


def _columns(fields: Mapping[str, pa.DataType]) -> tuple[list[str], list[pa.DataType]]:
    return list(fields), list(fields.values())


def _kept_field(name: str, kind: pa.DataType | None, are_typed: bool) -> pa.Field:
    if kind is None or not are_typed:
        return pa.field(name, pa.string(), metadata=_JSON_MARK)
    return pa.field(name, _plain_type(kind))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Dictionaries as their values: a dictionary of one part would not be that of the next."""
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    return kind
