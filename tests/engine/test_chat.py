"""Chat templates: as Hugging Face renders them, sandboxed, with refusals in the template's own words."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gristmill.engine.errors import ChatTemplateError, ModelRefused
from gristmill.engine.text.chat import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": ' <b>"Đơn hàng" & more</b>\n'},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def _render(source: str, messages: list[dict[str, Any]] = MESSAGES) -> str:
    return ChatTemplate(source, SPECIAL, "model").render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}",
        "{{ bos_token }}\n  {% if add_generation_prompt %}\nassistant:\n  {% endif %}\nend\n",
        "{% for m in messages %}\n {% if loop.last %}{% break %}{% endif %}\n{{ m | tojson }}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}{{ nothing is defined }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}x",
    ],
)
def test_a_template_renders_as_hugging_face_renders_it(source: str) -> None:
    expected, _ = render_jinja_template(  # type: ignore[str-unpack]
        [MESSAGES], chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert _render(source) == expected[0]


def test_what_the_template_refuses_is_said_in_its_own_words() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="^roles must alternate$"):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + none }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.x.y }}",
    ],
)
def test_messages_that_a_template_cannot_handle_are_an_error_of_the_row(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="."):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ range(999999999) | list }}",
    ],
)
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        _render(source)


def test_strftime_now_gives_the_date() -> None:
    before = datetime.now().astimezone().strftime("%d %b %Y")
    found = _render("{{ strftime_now('%d %b %Y') }}")
    assert found in (before, datetime.now().astimezone().strftime("%d %b %Y"))
    assert re.fullmatch(r"\d\d \w+ \d{4}", found)


def test_a_template_that_does_not_compile_refuses_the_model() -> None:
    with pytest.raises(ModelRefused, match=r"^model: the chat template does not compile: .*line 2"):
        ChatTemplate("{{ messages }}\n{% for %}", SPECIAL, "model")
