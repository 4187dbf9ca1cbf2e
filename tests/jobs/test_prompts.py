"""Rows to chat messages."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.prompt.source import PromptSource
from gristmill.jobs.row_errors import RowError, SkipRow
from gristmill.jobs.spec import JobSpec, parse_spec

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def spec(**fields: Any) -> JobSpec:
    return parse_spec({"input": "a", "output": "o", "model": "null:", **fields})


def build(values: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return PromptSource(spec(**fields), values).build(values)


def fail(values: dict[str, Any], **fields: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        build(values, **fields)
    return caught.value


def test_a_prompt_becomes_a_user_message() -> None:
    assert build({"t": "x"}, prompt="Say {{ t }}") == [{"role": "user", "content": "Say x"}]


def test_a_system_template_comes_first() -> None:
    source = PromptSource(spec(prompt="{{ t }}", system="In {{ lang }}."), ["t", "lang", "other"])
    assert source.columns == {"t", "lang"}
    assert source.build({"t": "x", "lang": "vi"}) == [
        {"role": "system", "content": "In vi."},
        {"role": "user", "content": "x"},
    ]


def test_a_chat_is_read_from_a_list_or_from_its_json() -> None:
    assert build({"chat": CHAT}, messages="chat") == CHAT
    assert build({"chat": '[{"role": "user", "content": "Hi"}]'}, messages="chat") == CHAT[1:]


def test_a_system_template_does_not_replace_the_rows_own() -> None:
    assert build({"m": CHAT}, messages="m", system="Else") == CHAT
    assert build({"m": CHAT[1:]}, messages="m", system="Else")[0] == {"role": "system", "content": "Else"}


def test_text_parts_are_joined_and_other_keys_stay_unless_null() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts, "name": "Ann", "tool_calls": None}]
    assert build({"m": chat}, messages="m") == [{"role": "user", "content": "ab", "name": "Ann"}]


def test_the_default_columns_are_messages_then_prompt() -> None:
    assert build({"prompt": "p", "messages": CHAT}) == CHAT
    assert build({"prompt": "{{ not a template }}"}) == [{"role": "user", "content": "{{ not a template }}"}]
    with pytest.raises(RefusedError, match="messages or prompt.*--prompt.*text"):
        PromptSource(spec(), ["text"])


def test_an_unknown_column_is_refused_with_those_that_exist() -> None:
    with pytest.raises(RefusedError, match="'txt'; the columns are id, text"):
        PromptSource(spec(prompt="{{ txt }}"), ["text", "id"])
    with pytest.raises(RefusedError, match="--messages uses the column 'chat'"):
        PromptSource(spec(messages="chat"), ["text"])


def test_when_nothing_is_known_of_the_rows_any_column_is_accepted() -> None:
    assert PromptSource(spec(prompt="{{ x }}"), []).columns == {"x"}
    assert PromptSource(spec(), []).columns == {"prompt"}


@pytest.mark.parametrize(
    ("chat", "code"),
    [
        (None, "null_value"),
        (float("nan"), "null_value"),
        (3, "wrong_type"),
        ({"role": "user", "content": "x"}, "wrong_type"),
        ([], "invalid_messages"),
        ("not json", "invalid_messages"),
        ("[" * 100_000, "invalid_messages"),
        ("{}", "invalid_messages"),
        (["x"], "invalid_messages"),
        ([{"content": "x"}], "invalid_messages"),
        ([{"role": "user"}], "invalid_messages"),
        ([{"role": "user", "content": 5}], "invalid_messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "invalid_messages"),
        ([{"role": "user", "content": " \n"}], "empty_prompt"),
        ([{"role": "user", "content": "\ud800"}], "invalid_text"),
        ([{"role": "user", "content": "x", "name": "\udfff"}], "invalid_text"),
    ],
)
def test_a_bad_chat_is_an_error_of_its_row(chat: Any, code: str) -> None:
    error = fail({"m": chat}, messages="m")
    assert error.code == code
    assert len(error.message) < 400


def test_a_prompt_without_text_is_an_error() -> None:
    assert fail({"t": " \t"}, prompt="{{ t }}\n").code == "empty_prompt"
    assert fail({"prompt": ""}).code == "empty_prompt"
    assert fail({"prompt": "  "}, system="but a system").code == "empty_prompt"


def test_a_default_prompt_that_is_no_text_is_an_error() -> None:
    assert fail({"prompt": 3}).code == "wrong_type"
    assert fail({"prompt": ["a"]}).code == "wrong_type"


def test_a_lone_surrogate_is_an_error_only_where_it_is_used() -> None:
    assert fail({"t": "\ud800", "u": "x"}, prompt="{{ t }}").code == "invalid_text"
    assert build({"t": "\ud800", "u": "x"}, prompt="{{ u }}")


def test_nulls_follow_the_policy() -> None:
    values = {"m": None, "t": None, "u": "x"}
    assert fail(values, messages="m").code == "null_value"
    assert fail(values, messages="m", on_null="empty").code == "empty_prompt"
    assert fail({"m": None}, prompt="{{ m }}", on_null="empty").code == "empty_prompt"
    assert build(values, prompt="{{ u }}{{ t }}", on_null="empty")[0]["content"] == "x"
    for fields in ({"messages": "m"}, {"prompt": "{{ t }}"}, {"prompt": "{{ u }}", "system": "{{ t }}"}):
        with pytest.raises(SkipRow):
            build(values, on_null="skip", **fields)


def test_a_row_that_lacks_the_column_is_an_error() -> None:
    source = PromptSource(spec(messages="m"), ["m"])
    with pytest.raises(RowError) as caught:
        source.build({"other": 1})
    assert caught.value.code == "missing_column"
