"""From a row to chat messages: by the template, a column that holds a chat, or the default columns."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.prompt.template import PromptTemplate
from gristmill.jobs.row_errors import RowError, SkipRow
from gristmill.jobs.spec import JobSpec
from gristmill.jobs.values import has_lone_surrogate

DEFAULT_COLUMNS = ("messages", "prompt")
_MAX_NAMES_SHOWN = 30


class PromptSource:
    """Builds the messages of each row of one job. `columns` are those it reads."""

    def __init__(self, spec: JobSpec, available_columns: Collection[str]) -> None:
        """RefusedError for an unknown column or a template that can't be compiled.

        `available_columns` empty: nothing is known of the rows, so any column is accepted.
        """
        self._on_null = spec.on_null
        self._system = PromptTemplate(spec.system, "--system") if spec.system is not None else None
        self._prompt: PromptTemplate | None = None
        self._text_column: str | None = None
        self._chat_column: str | None = None
        if spec.prompt is not None:
            self._prompt = PromptTemplate(spec.prompt, "--prompt")
        elif spec.messages is not None:
            self._chat_column = spec.messages
        else:
            self._choose_default(available_columns)
        own = self._prompt.columns if self._prompt else {self._chat_column or self._text_column or ""}
        self.columns: frozenset[str] = frozenset(own) | (
            self._system.columns if self._system else frozenset()
        )
        _check_columns(
            self.columns, available_columns, "--messages" if spec.messages is not None else "the template"
        )

    def build(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The row's messages. RowError for a fault of the row, SkipRow for a null that is to be skipped."""
        if self._chat_column is not None:
            messages = build_messages(self._chat_column, self._load(values, self._chat_column))
            if self._system is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": self._system.render(values, self._on_null)})
        else:
            messages = [{"role": "user", "content": self._build_text(values)}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system.render(values, self._on_null)})
        for message in messages:
            text = message["content"]
            if len(message) > 2 or text is None or not message["role"].isascii():
                text = json.dumps(message, ensure_ascii=False, default=str)
            if not text.isascii() and has_lone_surrogate(text):
                raise RowError(
                    "invalid_text", "the prompt holds lone surrogates, which no UTF-8 text can have"
                )
        return messages

    def _choose_default(self, available_columns: Collection[str]) -> None:
        if "messages" in available_columns:
            self._chat_column = "messages"
        elif "prompt" in available_columns or not available_columns:
            self._text_column = "prompt"
        else:
            names = _list_names(available_columns)
            raise RefusedError(
                "no column is named messages or prompt; say --prompt TEMPLATE or --messages COLUMN;"
                f" the columns are {names}"
            )

    def _build_text(self, values: Mapping[str, Any]) -> str:
        if self._prompt is not None:
            text = self._prompt.render(values, self._on_null)
        else:
            assert self._text_column is not None
            text = self._load(values, self._text_column)
            if not isinstance(text, str):
                raise RowError("wrong_type", f"column {self._text_column!r} is {_kind(text)}, not a text")
        if not text or text.isspace():
            raise RowError("empty_prompt", "the prompt has no text")
        return text

    def _load(self, values: Mapping[str, Any], column: str) -> Any:
        """A column's value; nulls and missing ones by --on-null."""
        value = values.get(column)
        if value is not None and value == value:
            return value
        if self._on_null == "skip":
            raise SkipRow(column)
        if self._on_null == "empty":
            raise RowError("empty_prompt", f"column {column!r} is null")
        if column in values:
            raise RowError("null_value", f"column {column!r} is null")
        raise RowError("missing_column", f"column {column!r} is missing")


def build_messages(column: str, value: Any) -> list[dict[str, Any]]:
    """A chat from a column: a list of {role, content}, or that as JSON text. RowError when it is not.

    content is a text or a list of {type: text, text}. Other keys stay, unless they are null.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowError(
                "invalid_messages", f"column {column!r} is not valid JSON: {str(error)[:200]}"
            ) from None
    elif not isinstance(value, (list, tuple)):
        raise RowError("wrong_type", f"column {column!r} is {_kind(value)}, not a list of {{role, content}}")
    if not isinstance(value, (list, tuple)):
        raise RowError(
            "invalid_messages", f"column {column!r} is {_kind(value)}, not a list of {{role, content}}"
        )
    if not value:
        raise RowError("invalid_messages", f"column {column!r} holds no messages")
    messages = [_build_message(column, index, message) for index, message in enumerate(value)]
    if not any(m["content"] and not m["content"].isspace() for m in messages):
        raise RowError("empty_prompt", f"column {column!r} holds messages without text")
    return messages


def _build_message(column: str, index: int, message: Any) -> dict[str, Any]:
    where = f"column {column!r}, message {index}"
    if not isinstance(message, dict):
        raise RowError("invalid_messages", f"{where}: is {_kind(message)}, not {{role, content}}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RowError("invalid_messages", f"{where}: role is {_kind(role)}, not a text")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        content = "".join(_part_text(where, part) for part in content)
    elif content is None and not message.get("tool_calls"):
        raise RowError("invalid_messages", f"{where}: has no content")
    elif content is not None and not isinstance(content, str):
        raise RowError("invalid_messages", f"{where}: content is {_kind(content)}, not a text")
    others = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    return {"role": role, "content": content, **others}


def _part_text(where: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise RowError("invalid_messages", f"{where}: a part of content is no {{type: text, text}}")
    return text


def _check_columns(used: Collection[str], available: Collection[str], user: str) -> None:
    unknown = sorted(set(used) - set(available))
    if unknown and available:
        raise RefusedError(f"{user} uses the column {unknown[0]!r}; the columns are {_list_names(available)}")


def _list_names(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_NAMES_SHOWN])
    more = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    kinds = {dict: "an object", list: "a list", str: "a text", type(None): "null", bytes: "binary"}
    return kinds.get(type(value), f"a {type(value).__name__}")
