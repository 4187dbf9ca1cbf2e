"""The model's chat template: messages to one text, rendered as Hugging Face renders it, in a sandbox.

The template is the model's, so what it refuses is an error of the row and keeps the template's own words.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.engine.errors import ChatTemplateError, ModelRefused

# What a template's own expressions raise on messages that it did not expect.
_FAULTS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


class ChatTemplate:
    """A compiled template. special_tokens: bos_token, eos_token, ... as the template sees them."""

    def __init__(self, source: str, special_tokens: dict[str, str], origin: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelRefused(
                f"{origin}: the chat template does not compile: {error.message} (line {error.lineno});"
                " correct the template"
            ) from error
        self._special_tokens = special_tokens

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt up to where the assistant's answer begins; raises ChatTemplateError."""
        try:
            values = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
            return self._template.render(self._special_tokens | values)
        except _FAULTS as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a training learns; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
