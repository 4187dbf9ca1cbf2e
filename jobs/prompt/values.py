"""What a template sees of a row: values as they are, and nulls and missing ones as objects that can't be
printed.

A null may be tested (`if x`, `x is none`, `x or y`, `x | default(y)`); any other use of it raises
ValueMissing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from jinja2 import Undefined
from jinja2.utils import missing

from gristmill.jobs.row_errors import RowError
from gristmill.jobs.values import to_scalar_text

SCALARS = (int, float, date, datetime, time, timedelta, Decimal)


class ValueMissing(Exception):
    """A null or missing value was used; `name` is the column, or the path of a field in one."""

    def __init__(self, code: str, name: str, what: str) -> None:
        super().__init__(f"{what} is {'null' if code == 'null_value' else 'missing'}")
        self.code = code
        self.name = name


class MissingValue(Undefined):
    """What a name stands for that the row lacks (also an attribute or item that a value lacks)."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        # Jinja asks for this whenever it is about to raise; a hint comes with an error of its own.
        if self._undefined_hint is None:
            name = str(self._undefined_name)
            what = f"column {name!r}" if self._undefined_obj is missing else f"a field or item {name!r}"
            raise ValueMissing("missing_column", name, what)
        return super()._undefined_message

    __iter__ = __str__ = __len__ = __hash__ = __contains__ = Undefined._fail_with_undefined_error

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MissingValue)

    def __ne__(self, other: object) -> bool:
        return not self == other


class NullValue(MissingValue):
    """A null of the row, or a NaN."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        raise ValueMissing("null_value", str(self._undefined_name), f"column {str(self._undefined_name)!r}")

    __hash__ = Undefined._fail_with_undefined_error

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, NullValue)


class EmptyNull(str):
    """A null under --on-null empty: prints as nothing, and is still none."""

    __slots__ = ()


def is_null(value: Any) -> bool:
    """The test `is none`."""
    return value is None or isinstance(value, (NullValue, EmptyNull))


def wrap_value(name: str, value: Any, empty: bool) -> Any:
    """The value for the template: every None and NaN in it, at any depth, is a NullValue or EmptyNull."""
    if value is None or (isinstance(value, float) and value != value):
        return EmptyNull() if empty else NullValue(name=name)
    if isinstance(value, dict) and _holds_null(value.values()):
        return {key: wrap_value(f"{name}.{key}", child, empty) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and _holds_null(value):
        return [wrap_value(f"{name}[{i}]", child, empty) for i, child in enumerate(value)]
    return value


def _holds_null(children: Iterable[Any]) -> bool:
    for child in children:
        if child is None or child != child or isinstance(child, (dict, list, tuple)):
            return True
    return False


def to_scalar(value: Any) -> str:
    """Text of a value that is no list and no mapping. Raises for what has no text: nulls, NaN, functions."""
    if isinstance(value, (str, Undefined)):
        return str(value)
    if value is None or (isinstance(value, float) and value != value):
        raise ValueMissing("null_value", "none", "a value that the template makes")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RowError(
                "invalid_utf8", "a binary value that the template prints is not valid UTF-8"
            ) from None
    if isinstance(value, SCALARS):
        return to_scalar_text(value)
    raise RowError("template_error", f"the template prints a {type(value).__name__}, which has no text")


def is_listing(value: Any) -> bool:
    """Whether a value prints as JSON: lists, mappings and what filters like `map` return."""
    return isinstance(value, (list, tuple, Mapping, Iterator, range)) or type(value).__name__ in _VIEWS


_VIEWS = {"dict_items", "dict_keys", "dict_values", "set"}
