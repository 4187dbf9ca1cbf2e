"""The filters and tests that a prompt template may use: Jinja's own, each charged, and a few of ours instead.

Left out: `random` (not reproducible), `attr`, `pprint`, `urlize`, `xmlattr`. There is no HTML escaping.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from gristmill.jobs.prompt.limits import (
    STEP_COST,
    TemplateContext,
    charge_concat,
    charge_plain,
    charge_replace,
    charge_result,
    charge_steps,
    format_percent,
    to_text,
)
from gristmill.jobs.prompt.values import EmptyNull, NullValue, is_null
from gristmill.jobs.row_errors import RowError

MAX_ARGUMENT = 1_000_000  # of a filter that takes a size

_TEXT_FILTERS = """
capitalize center indent lower string striptags title trim truncate upper urlencode wordcount wordwrap
""".split()
_VALUE_FILTERS = """
abs batch count dictsort filesizeformat first float groupby int items last length list map max min reject
rejectattr reverse round select selectattr slice sort unique
""".split()


def build_filters() -> dict[str, Any]:
    """Filter functions by name."""
    filters: dict[str, Any] = {
        name: _build_charged(name, FILTERS[name]) for name in (*_TEXT_FILTERS, *_VALUE_FILTERS)
    }
    filters |= {"default": _default, "d": _default, "join": _join, "sum": _sum, "tojson": _to_json}
    filters |= {"format": _format, "replace": _replace, "escape": _escape, "e": _escape, "safe": _to_string}
    filters |= {"#steps": charge_steps, "#concat": charge_concat}
    return filters


def build_tests() -> dict[str, Any]:
    """Test functions by name; a null is defined and none."""
    return TESTS | {
        "none": is_null,
        "defined": lambda value: isinstance(value, NullValue) or not isinstance(value, Undefined),
        "undefined": lambda value: isinstance(value, Undefined) and not isinstance(value, NullValue),
    }


def _build_charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passed = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    takes_text = name in _TEXT_FILTERS

    @pass_context
    def charged(context: TemplateContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        limit = 300 if name == "round" else MAX_ARGUMENT
        if any(isinstance(a, int) and a > limit for a in (*args, *kwargs.values())):
            raise RowError("template_error", f"an argument of the filter {name!r} is over {limit}")
        context.charge(STEP_COST)
        if takes_text:
            value = to_text(context, value)
            _charge_growth(context, name, value, args, kwargs)
        lead = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = (lead[passed],) if passed else ()
        return charge_result(context, function(*first, value, *args, **kwargs))

    return charged


def _charge_growth(
    context: TemplateContext, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Charges the filters whose result can be much longer than the text."""
    if name == "indent":
        width = args[0] if args else kwargs.get("width", 4)
        size = width if isinstance(width, int) else len(str(width))
        context.charge(max(size, 0) * (len(text.splitlines()) + 1))
    elif name == "center":
        context.charge(max((a for a in (*args, *kwargs.values()) if isinstance(a, int)), default=80))
    elif name == "wordwrap":
        context.charge(
            len(text) * max((len(a) for a in (*args, *kwargs.values()) if isinstance(a, str)), default=1)
        )


def _default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    if isinstance(value, (Undefined, EmptyNull)) or value is None or (boolean and not value):
        return default_value
    return value


@pass_context
def _join(context: TemplateContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    separator = to_text(context, d)
    parts = []
    for part in value:
        parts.append(to_text(context, part))
        context.charge(len(separator) + STEP_COST)
    return separator.join(parts)


@pass_context
def _sum(context: TemplateContext, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    total = start
    for number in value:
        context.charge(STEP_COST)
        if isinstance(number, (str, list, tuple, dict)):
            raise RowError("template_error", "the filter 'sum' adds numbers only")
        total = total + number
    return total


@pass_context
def _to_json(context: TemplateContext, value: Any, indent: int | None = None) -> str:
    if isinstance(value, (Undefined, EmptyNull)):
        to_text(context, value)
    plain = charge_plain(context, value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=min(indent, 8) if indent else None)
    return str(charge_result(context, text))


@pass_context
def _format(context: TemplateContext, value: Any, *args: Any, **kwargs: Any) -> str:
    return format_percent(context, to_text(context, value), kwargs or args)


@pass_context
def _replace(context: TemplateContext, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (to_text(context, part) for part in (value, old, new))
    charge_replace(context, text, old, new)
    return text.replace(old, new, -1 if count is None else count)


@pass_context
def _escape(context: TemplateContext, value: Any) -> str:
    return str(charge_result(context, html.escape(to_text(context, value))))


@pass_context
def _to_string(context: TemplateContext, value: Any) -> str:
    return to_text(context, value)
