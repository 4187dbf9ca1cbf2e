"""Faults of single rows: they become error Results and never end a job. The codes are public."""

from __future__ import annotations

ROW_ERROR_CODES: dict[str, str] = {
    "invalid_json": "the line is not valid JSON, or is nested too deeply",
    "invalid_utf8": "the line or value is not valid UTF-8",
    "invalid_text": "a text that is used holds lone surrogates and can't be encoded",
    "line_too_long": "the line or value is over the size limit",
    "not_an_object": "the line is valid JSON but not an object",
    "missing_column": "the row lacks a column, or a field of one, that the prompt uses",
    "null_value": "a column that the prompt uses is null (or NaN)",
    "wrong_type": "a value has a type that can't be used there",
    "invalid_messages": "the messages column is not a list of {role, content}",
    "empty_prompt": "the prompt has no text",
    "template_error": "the prompt template failed on this row, or went over a limit",
    "chat_template_error": "the model's chat template refused the messages",
    "prompt_too_long": "the prompt does not fit the model's context",
    "request_too_large": "the request can never fit the KV cache",
    "engine_failure": "the engine failed on this row",
    "poisoned": "the row ended the engine process more than once",
    "null_failure": "the null engine failed this row on purpose (failure_rate)",
}


class RowError(Exception):
    """A fault of one row. `code` is a key of ROW_ERROR_CODES; `message` is for people."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ROW_ERROR_CODES, code
        super().__init__(message)
        self.code = code
        self.message = message


class SkipRow(Exception):
    """The row has a null and the order says --on-null skip: no request, and a Result that says so."""

    def __init__(self, column: str) -> None:
        super().__init__(f"column {column!r} is null")
        self.column = column
