"""A sandbox for prompt templates in which no template can take much memory: everything it makes is charged
first.

One budget per render, in characters: each loop step, call, filter and operator pays for what it is about to
make. It bounds memory and steps; there is no wall-clock deadline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from gristmill.jobs.prompt.values import SCALARS, EmptyNull, MissingValue, is_listing, to_scalar
from gristmill.jobs.row_errors import RowError
from gristmill.jobs.values import to_plain

MAX_RENDER_COST = 64 << 20
MAX_INT_BITS = 1 << 16
STEP_COST = 64
_CALL_COST = 256
_ITEM_COST = 16

_STR_METHODS = frozenset(
    """
    capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit
    islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix
    replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title
    upper zfill
    """.split()
)
_DATE_ATTRIBUTES = frozenset(
    """
    year month day hour minute second microsecond isoformat weekday isoweekday date time timestamp strftime
    days seconds total_seconds
    """.split()
)
_SAFE_ATTRIBUTES: dict[str, frozenset[str]] = {
    "str": _STR_METHODS,
    "EmptyNull": _STR_METHODS,
    "dict": frozenset({"items", "keys", "values", "get"}),
    "list": frozenset({"index", "count"}),
    "tuple": frozenset({"index", "count"}),
    "date": _DATE_ATTRIBUTES,
    "datetime": _DATE_ATTRIBUTES,
    "time": _DATE_ATTRIBUTES,
    "timedelta": _DATE_ATTRIBUTES,
    "float": frozenset({"is_integer"}),
}
_OWN_TYPES = frozenset({"LoopContext", "Namespace", "Macro", "Cycler", "Joiner", "_GroupTuple"})


class TemplateContext(Context):
    """The context of one render, with what is left of its budget."""

    budget = MAX_RENDER_COST

    def charge(self, cost: int) -> None:
        """Pays for something before it is made. RowError when the budget is used up."""
        self.budget -= cost
        if self.budget < 0:
            raise RowError("template_error", f"the template makes more than {MAX_RENDER_COST} characters")


def to_text(context: TemplateContext, value: Any) -> str:
    """What `{{ value }}` prints, charged."""
    if value.__class__ is str:
        text: str = value
    elif not isinstance(value, SCALARS) and is_listing(value):
        text = json.dumps(charge_plain(context, value), ensure_ascii=False, allow_nan=False)
    else:
        text = to_scalar(value)
    context.charge(len(text))
    return text


def charge_plain(context: TemplateContext, value: Any) -> Any:
    """The value made of JSON's own types, each node charged: lists may share parts and print without end."""
    context.charge(STEP_COST)
    if isinstance(value, (EmptyNull, Undefined)):
        if isinstance(value, Undefined) and type(value) is MissingValue:
            str(value)  # raises
        return None
    if isinstance(value, str):
        context.charge(len(value))
        return value
    if isinstance(value, Mapping):
        return {to_scalar(k): charge_plain(context, child) for k, child in value.items()}
    if is_listing(value):
        return [charge_plain(context, child) for child in value]
    return to_plain(value)


def charge_result(context: TemplateContext, result: Any) -> Any:
    """Charges what a call or filter made."""
    if isinstance(result, (str, bytes)):
        context.charge(len(result))
    elif isinstance(result, (list, tuple, dict)):
        context.charge(len(result) * _ITEM_COST)
    return result


def charge_replace(context: TemplateContext, text: str, old: str, new: str) -> None:
    """Charges `text.replace(old, new)` before it runs."""
    context.charge(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def build_format_arguments(context: TemplateContext, template: str, values: Iterable[Any]) -> list[Any]:
    """Arguments that may be formatted: numbers as they are, the rest as text. Refuses large widths."""
    if re.search(r"\d{4}|\*|\{[^{}]*\{", template):
        raise RowError("template_error", "a format has a width over 999, or one that is a variable")
    arguments = [v if isinstance(v, (int, float)) and v == v else to_text(context, v) for v in values]
    longest = max((len(a) for a in arguments if isinstance(a, str)), default=0)
    context.charge(len(template) + (template.count("%") + template.count("{")) * max(longest, 1000))
    return arguments


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, an allowlist of attributes, and a price on everything that makes a value."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = TemplateContext

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A struct's field comes before a method of the same name."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only what is listed: a method like int.to_bytes can make a gigabyte."""
        name = type(obj).__name__
        listed = name in _OWN_TYPES or attr in _SAFE_ATTRIBUTES.get(name, ())
        return listed and bool(super().is_safe_attribute(obj, attr, value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        """A call from the template, charged before and after."""
        assert isinstance(__context, TemplateContext)
        __context.charge(_CALL_COST + (__self.static_cost if isinstance(__obj, Macro) else 0))
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args, kwargs = _charge_str_method(__context, owner, method.__name__, args, kwargs)
        elif getattr(method, "__name__", "") == "strftime" and len(str(args)) > 1000:
            raise RowError("template_error", "a date format has more than 1000 characters")
        return charge_result(__context, super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make something large, charged before it runs."""
        assert isinstance(context, TemplateContext)
        if isinstance(left, int) and isinstance(right, int):
            bits = (
                max(left.bit_length(), 1) * abs(right)
                if operator == "**"
                else left.bit_length() + right.bit_length()
            )
            if bits > MAX_INT_BITS:
                raise RowError(
                    "template_error", f"a number in the template has more than {MAX_INT_BITS} bits"
                )
        elif operator == "%" and isinstance(left, str):
            return format_percent(context, left, right)
        elif operator == "+":
            context.charge(_size(left) + _size(right))
        elif operator == "*":
            times = right if isinstance(right, int) else left
            context.charge((_size(left) + _size(right)) * max(times, 1) if isinstance(times, int) else 0)
        return super().call_binop(context, operator, left, right)

    static_cost = 0  # the template's own text, which a macro may print at each call


def format_percent(context: TemplateContext, template: str, right: Any) -> str:
    """`template % right`."""
    if isinstance(right, Mapping):
        values = build_format_arguments(context, template, right.values())
        return template % dict(zip(right.keys(), values, strict=True))
    values = build_format_arguments(context, template, right if isinstance(right, tuple) else (right,))
    return template % tuple(values)


def _charge_str_method(
    context: TemplateContext, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Undefined):
            str(value)  # raises
    if name == "format_map":
        raise RowError("template_error", "format_map can't be used; use format")
    if name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        context.charge(max(args[0], 0))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        charge_replace(context, text, args[0], args[1])
    elif name == "join" and args:
        parts = [to_text(context, part) for part in args[0]]
        context.charge(len(text) * len(parts))
        return (parts,), kwargs
    elif name == "format":
        values = build_format_arguments(context, text, (*args, *kwargs.values()))
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
    return args, kwargs


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return len(value) * _ITEM_COST if isinstance(value, (list, tuple)) else 0


@pass_context
def finalize(context: TemplateContext, value: Any) -> str:
    """Applied by Jinja to every `{{ value }}`."""
    return to_text(context, value)


@pass_context
def charge_steps(context: TemplateContext, iterable: Iterable[Any], cost: int) -> Iterator[Any]:
    """Applied to what every `for` loops over: each step pays for the loop's own text."""
    for item in iterable:
        context.charge(cost)
        yield item


@pass_context
def charge_concat(context: TemplateContext, parts: list[Any]) -> str:
    """The operator `~`."""
    return "".join([to_text(context, part) for part in parts])


class ChargeTransformer(NodeTransformer):
    """Rewrites loops and `~`, which have no hook, into the filters above; no template can name those."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """`for x in xs` becomes `for x in xs | #steps`."""
        self.generic_visit(node)
        cost = STEP_COST + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = nodes.Filter(node.iter, "#steps", [nodes.Const(cost)], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """`a ~ b` becomes `[a, b] | #concat`."""
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "#concat", [], [], None, None, lineno=node.lineno)
