"""Prompt templates: Jinja over one row's columns, in a sandbox with limits. Templates come from the job,
never from rows.

`{{ name }}` prints a column; `{{ row["any name"] }}` one whose name is no identifier. A null or missing
column that is printed, joined or looped over fails the row (or --on-null says otherwise); the text "None" or
"nan" never appears.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.visitor import NodeTransformer

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.prompt.filters import build_filters, build_tests
from gristmill.jobs.prompt.limits import ChargeTransformer, TemplateContext, TemplateEnvironment, finalize
from gristmill.jobs.prompt.values import EmptyNull, MissingValue, ValueMissing, wrap_value
from gristmill.jobs.row_errors import RowError, SkipRow

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 4 << 20
_GLOBALS = ("range", "namespace", "cycler", "joiner")
_ROW = "_row_"
_REFUSED_NODES = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "import",
    nodes.Extends: "extends",
    nodes.Block: "block",
    nodes.EvalContextModifier: "autoescape",
}

OnNull = Literal["error", "skip", "empty"]


class PromptTemplate:
    """A compiled template. `columns` are the columns it can use; `option` names it in messages."""

    def __init__(self, text: str, option: str = "--prompt") -> None:
        """RefusedError for a template that can't be compiled, naming the line."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise RefusedError(f"{option} has {len(text)} characters, the limit is {MAX_TEMPLATE_CHARS}")
        environment = TemplateEnvironment(undefined=MissingValue, finalize=finalize, optimized=False)
        environment.filters = build_filters()
        environment.tests = build_tests()
        environment.globals = {name: environment.globals[name] for name in _GLOBALS}
        environment.static_cost = len(text)
        try:
            tree = environment.parse(text)
            self._named = _name_columns(tree)
            _check_nodes(option, tree)
            self._direct = tuple(sorted(meta.find_undeclared_variables(tree) - {*_GLOBALS, _ROW}))
            tree = ChargeTransformer().visit(tree)
            tree.set_environment(environment)
            template: Template = environment.from_string(tree)
        except TemplateSyntaxError as error:
            raise RefusedError(f"{option}, line {error.lineno}: {error.message}") from None
        except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            raise RefusedError(f"{option} is not a valid template: {error or type(error).__name__}") from None
        self._environment = environment
        self._globals = environment.globals
        self._blocks = template.blocks
        self._root = template.root_render_func
        self.columns = frozenset((*self._direct, *self._named))

    def render(self, values: Mapping[str, Any], on_null: OnNull = "error") -> str:
        """The prompt's text. RowError when the row can't be rendered, SkipRow for a null under `skip`."""
        variables = self._globals.copy()
        empty = on_null == "empty"
        for name in self._direct:
            if name in values:
                value = values[name]
                variables[name] = value if value.__class__ is str else wrap_value(name, value, empty)
            elif empty:
                variables[name] = EmptyNull()
        if self._named:
            variables[_ROW] = self._build_row(values, empty)
        context = TemplateContext(self._environment, variables, None, self._blocks)
        try:
            return self._join(context)
        except ValueMissing as error:
            if on_null == "skip":
                raise SkipRow(error.name) from None
            raise RowError(error.code, str(error)) from None
        except RowError:
            raise
        except Exception as error:  # a row border: the template is the job's own code
            raise RowError("template_error", f"{type(error).__name__}: {str(error)[:500]}") from None

    def _join(self, context: TemplateContext) -> str:
        parts = []
        size = 0
        for part in self._root(context):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                raise RowError("template_error", f"the prompt has more than {MAX_OUTPUT_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def _build_row(self, values: Mapping[str, Any], empty: bool) -> dict[str, Any]:
        missing = EmptyNull() if empty else None
        return {
            name: wrap_value(name, values[name], empty)
            if name in values
            else (missing if missing is not None else MissingValue(name=name))
            for name in self._named
        }


def _name_columns(tree: nodes.Template) -> tuple[str, ...]:
    """Rewrites `row["any name"]`, unless the template sets `row` itself; returns the names."""
    if any(name.name == "row" and name.ctx != "load" for name in tree.find_all(nodes.Name)):
        return ()
    finder = _RowTransformer()
    finder.visit(tree)
    return tuple(sorted(finder.columns))


class _RowTransformer(NodeTransformer):
    def __init__(self) -> None:
        self.columns: set[str] = set()

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        key = node.arg
        if (
            isinstance(node.node, nodes.Name)
            and node.node.name == "row"
            and isinstance(key, nodes.Const)
            and isinstance(key.value, str)
        ):
            self.columns.add(key.value)
            node.node.name = _ROW
        return node


def _check_nodes(option: str, tree: nodes.Template) -> None:
    for kind, tag in _REFUSED_NODES.items():
        found = tree.find(kind)
        if found is not None:
            raise RefusedError(f"{option}, line {found.lineno}: {{% {tag} %}} can't be used here")
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("__"):
            raise RefusedError(
                f"{option}, line {attribute.lineno}: the attribute {attribute.attr!r} is not allowed"
            )
