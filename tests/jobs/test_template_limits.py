"""Templates that try to leave the sandbox or to fill memory: they fail the row, soon and in little memory."""

from __future__ import annotations

import tracemalloc
from datetime import date

import pytest

from gristmill.jobs.prompt.limits import TemplateContext
from gristmill.jobs.prompt.template import MAX_OUTPUT_CHARS, PromptTemplate
from gristmill.jobs.row_errors import RowError

GROW = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}{{ ns.s }}"


def grow(start: str, step: str) -> str:
    return GROW.replace("START", start).replace("STEP", step)


ESCAPES = [
    "{{ ''['__class__'] }}",
    "{{ '{0.__class__.__mro__}'.format(text) }}",
    "{{ '{x[__class__]}'.format_map({'x': text}) }}",
    "{{ self._TemplateReference__context }}",
    "{{ text.encode() }}",
    "{{ tags.append(1) }}",
    "{{ range }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ text.expandtabs(1000000000) }}",
    "{{ tags | map(attribute='__class__') | list }}",
]
GREEDY = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 10 ** (10**9) }}",
    "{{ (10 ** 10) ** (10 ** 10) }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{% set a %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ ('a\n' * 100000) | indent(100000) }}",
    "{{ ('a b ' * 100000) | wordwrap(1, true, 'x' * 10000) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ range(99999) | map('string') | join('a' * 10000) }}",
    "{{ dates.strftime('%c' * 100000) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    grow("'aaaa'", "ns.s ~ ns.s"),
    grow("'aaaa'", "ns.s + ns.s"),
    grow("'aaaa'", "ns.s * 2"),
    grow("'aaaa'", "ns.s.replace('a', ns.s)"),
    grow("'aaaa'", "ns.s | replace('a', ns.s)"),
    grow("'aaaa'", "[ns.s, ns.s] | join(ns.s)"),
    grow("'aaaa'", "ns.s.join([ns.s, ns.s])"),
    grow("'aaaa'", "'{0}{0}'.format(ns.s)"),
    grow("'aaaa'", "'%s%s' % (ns.s, ns.s)"),
    grow("['a']", "[ns.s, ns.s]"),
    grow("['a']", "ns.s + ns.s"),
    grow("[['a']]", "[ns.s, ns.s] | sum(start=[])"),
    grow("3", "ns.s * ns.s"),
    grow("'aaaa'", "x") .replace("{% set ns.s = x %}", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
]  # fmt: skip


@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_leaves_the_sandbox(template: str) -> None:
    with pytest.raises(RowError) as caught:
        PromptTemplate(template).render({"text": "x", "tags": ["a"]})
    assert caught.value.code in ("template_error", "missing_column")


@pytest.mark.parametrize("template", GREEDY)
def test_no_template_fills_memory(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A sixteenth of the real budget, so that the test is quick; what is measured scales with it.
    monkeypatch.setattr(TemplateContext, "budget", 4 << 20)
    compiled = PromptTemplate(template)
    tracemalloc.start()
    try:
        with pytest.raises(RowError) as caught:
            compiled.render({"dates": date(2020, 1, 1)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "template_error"
    assert peak < 40 << 20


def test_a_template_that_calls_itself_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TemplateContext, "budget", 4 << 20)
    body = "{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    with pytest.raises(RowError, match="the template makes more than"):
        PromptTemplate("{% macro m(n) %}" + body + "{% endmacro %}{{ m(60) }}").render({})


def test_the_prompt_itself_has_a_limit() -> None:
    template = PromptTemplate("{{ text }}{{ text }}")
    half = "x" * (MAX_OUTPUT_CHARS // 2)
    assert len(template.render({"text": half})) == MAX_OUTPUT_CHARS
    with pytest.raises(RowError, match=str(MAX_OUTPUT_CHARS)):
        template.render({"text": half + "x"})


def test_one_render_does_not_use_up_the_next_ones_budget() -> None:
    template = PromptTemplate("{% for i in range(n) %}{% endfor %}{{ text | trim }}")
    for _ in range(20):
        assert template.render({"n": 90_000, "text": " x "}) == "x"
