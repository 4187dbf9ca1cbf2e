"""Prompt templates: what a column prints, and that nulls never become text."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from gristmill.jobs.errors import RefusedError
from gristmill.jobs.prompt.template import PromptTemplate
from gristmill.jobs.row_errors import RowError, SkipRow

ROW: dict[str, Any] = {
    "text": "héllo",
    "null": None,
    "nan": float("nan"),
    "tags": ["x", "y"],
    "mixed": ["a", None],
    "user": {"name": None, "items": "mine", "_id": 5, "born": date(2020, 1, 2)},
}


def render(template: str, **values: Any) -> str:
    return PromptTemplate(template).render({**ROW, **values})


def fail(template: str, **values: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        render(template, **values)
    return caught.value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain <b>&", "plain <b>&"),
        (3, "3"),
        (0.1, "0.1"),
        (True, "True"),
        (Decimal("1E+3"), "1000"),
        (Decimal("1.50"), "1.50"),
        (date(2020, 1, 2), "2020-01-02"),
        (datetime(2020, 1, 2, 3, 4), "2020-01-02T03:04:00"),
        (["a", 1, None, "é"], '["a", 1, null, "é"]'),
        ({"a": [1], "n": float("nan"), "d": date(2020, 1, 2)}, '{"a": [1], "n": null, "d": "2020-01-02"}'),
        (b"bytes", "bytes"),
        ([], "[]"),
    ],
)
def test_a_value_prints_as(value: Any, text: str) -> None:
    assert render("{{ value }}|{{ value | string }}|{{ value ~ '' }}", value=value) == f"{text}|{text}|{text}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ %s }}",
        "{{ %s | upper }}",
        "{{ 'a' ~ %s }}",
        "{{ 'a' + %s }}",
        "{{ [text, %s] | join(',') }}",
        "{{ ','.join([%s]) }}",
        "{{ '%%s' | format(%s) }}",
        "{{ '%%s' %% %s }}",
        "{{ '{}'.format(%s) }}",
        "{{ text | replace('h', %s) }}",
        "{{ text.replace('h', %s) }}",
        "{{ %s | tojson }}",
        "{{ %s | length }}",
        "{{ %s | int }}",
        "{{ %s.field }}",
        "{{ %s | string }}",
        "{{ -%s }}",
        "{%% for x in %s %%}{%% endfor %%}",
        "{%% set x %%}{{ %s }}{%% endset %%}",
    ],
)
@pytest.mark.parametrize(
    ("column", "code", "name"),
    [
        ("null", "null_value", "null"),
        ("nan", "null_value", "nan"),
        ("user.name", "null_value", "user.name"),
        ("mixed[1]", "null_value", "mixed[1]"),
        ("absent", "missing_column", "absent"),
    ],
)
def test_a_null_or_missing_value_that_is_used_fails_the_row(
    template: str, column: str, code: str, name: str
) -> None:
    error = fail(template % column)
    assert (error.code, name in error.message) == (code, True)


def test_a_null_inside_a_joined_list_fails_the_row() -> None:
    assert "mixed[1]" in fail("{{ mixed | join(', ') }}").message
    assert fail("{{ none }}").code == "null_value"


def test_a_null_may_be_tested_for() -> None:
    for column in ("null", "nan", "user.name", "mixed[1]"):
        assert render(
            "{{ C or 'x' }} {{ C | default('y') }} {{ 1 if C else 2 }} {{ C is none }}".replace("C", column)
        ) == ("x y 2 True")
    assert render("{{ null == none }} {{ null != none }} {{ null is defined }}") == "True False True"
    assert render("{{ absent is defined }} {{ absent | default('z') }}") == "False z"


def test_on_null_empty_prints_nothing() -> None:
    template = PromptTemplate("[{{ null }}{{ nan }}{{ 'a' ~ absent }}{{ user.name }}] {{ user }}")
    text = template.render({**ROW, "user": {"name": None}}, "empty")
    assert text == '[a] {"name": null}'
    assert PromptTemplate("{{ null is none }} {{ null | default('x') }}").render(ROW, "empty") == "True x"


def test_on_null_skip_skips_only_rows_that_use_the_null() -> None:
    with pytest.raises(SkipRow, match="'null'"):
        PromptTemplate("{{ null }}").render(ROW, "skip")
    with pytest.raises(SkipRow, match="'absent'"):
        PromptTemplate("{{ absent }}").render(ROW, "skip")
    assert PromptTemplate("{{ null or text }}").render(ROW, "skip") == "héllo"


def test_a_field_comes_before_a_method_of_the_same_name() -> None:
    assert render("{{ user.items }} {{ user._id }} {{ user.born }}") == "mine 5 2020-01-02"
    assert fail("{{ user.nope }}").code == "missing_column"


def test_columns_are_those_the_template_reads() -> None:
    template = PromptTemplate(
        "{% set x = a %}{{ x }}{% for t in tags %}{{ t }}{{ loop.index }}{% endfor %}{{ range(3) }}"
    )
    assert template.columns == {"a", "tags"}
    assert PromptTemplate("no columns").columns == frozenset()


def test_a_column_of_any_name_is_reached_through_row() -> None:
    template = PromptTemplate("{{ row['first name'] }} {{ row['x'] | upper }}")
    assert template.columns == {"first name", "x"}
    assert template.render({"first name": "Ann", "x": "y"}) == "Ann Y"
    with pytest.raises(RowError, match="first name"):
        template.render({"x": "y"})
    assert PromptTemplate("{{ row }}").columns == {"row"}
    assert render("{% for row in [{'a': 1}] %}{{ row['a'] }}{% endfor %}") == "1"


def test_usual_jinja_works() -> None:
    assert render("{% for t in tags %}{{ loop.index }}/{{ loop.length }}{{ t }},{% endfor %}") == "1/2x,2/2y,"
    assert render("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(text) }}") == "[héllo]"
    assert (
        render("{% set n = namespace(c=0) %}{% for t in tags %}{% set n.c = n.c + 1 %}{% endfor %}{{ n.c }}")
        == "2"
    )
    assert render(
        "{{ tags | map('upper') | join('-') }} {{ tags | first }} {{ text[:2] }} {{ text.title() }}"
    ) == ("X-Y x hé Héllo")
    assert render("{{ '%.2f' | format(1.5) }} {{ '{:>4}'.format(7) }} {{ [1, 2.5] | sum }} {{ 7 % 4 }}") == (
        "1.50    7 3.5 3"
    )
    assert render("{{ {'b': tags} | tojson }} {{ '<b>' | e }}") == '{"b": ["x", "y"]} &lt;b&gt;'
    assert render("{% raw %}{{ x }}{% endraw %}") == "{{ x }}"
    assert render("line\n") == "line"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("a\n{{ text", "line 2"),
        ("{{ text | nope }}", "nope"),
        ("{% if %}", "line 1"),
        ("{% include 'x' %}", "include"),
        ("{% extends 'x' %}", "extends"),
        ("{% block x %}{% endblock %}", "block"),
        ("{% autoescape true %}{% endautoescape %}", "autoescape"),
        ("{{ ''.__class__.__mro__ }}", "not allowed"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "not a valid template"),
        ("x" * (1 << 20) + "y", "1048577 characters"),
    ],
)
def test_a_template_that_can_not_work_is_refused_before_any_row(template: str, words: str) -> None:
    with pytest.raises(RefusedError) as caught:
        PromptTemplate(template, "--prompt")
    assert words in str(caught.value) and str(caught.value).startswith("--prompt")
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_template_is_an_error_of_the_row() -> None:
    assert fail("{{ text + 1 }}").code == "template_error"
    assert fail("{{ 1 / 0 }}").code == "template_error"
    assert fail("{{ [] | first }}").code == "template_error"
    assert fail("{{ data }}", data=b"\xff").code == "invalid_utf8"
