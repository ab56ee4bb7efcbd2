from __future__ import annotations

import datetime
import time

import pytest

from chabok.errors import TemplateError
from chabok.text import budget
from chabok.text.sandbox import Program

NOW = datetime.datetime(2026, 11, 30, 12)
REPEAT = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
HOSTILE = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for i in range(99999) %}"
    "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "fixed text": "{% for i in range(100000) %}" + "y" * 100_000 + "{% endfor %}",
    "product of text": "{{ 'a' * 10**12 }}",
    "product of a list": "{% set x = [0] * 10**9 %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": REPEAT % ("9", "{% set ns.x = ns.x * ns.x %}"),
    "sum doubled": REPEAT % ("'a'", "{% set ns.x = ns.x + ns.x %}"),
    "joined doubled": REPEAT % ("'a'", "{% set ns.x = ns.x ~ ns.x %}"),
    "block doubled": REPEAT % ("'a'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "list doubled": REPEAT % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    "dictionary doubled": REPEAT % ("1", "{% set ns.x = {'a': ns.x, 'b': ns.x} %}"),
    "dict doubled": REPEAT % ("1", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "namespace doubled": REPEAT % ("1", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}"),
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "tree of macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "caller": "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}{% for i in range(99999) %}a{% endfor %}{% endcall %}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "percent name": "{{ '%(a)100000000d' % {'a': 1} }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "mapped format": "{{ ['%1000000000d'] | map('format', 1) | list }}",
    "replace method": "{% set a = 'x' * 1000000 %}{{ a.replace('x', a) }}",
    "replace filter": "{% set a = 'x' * 1000000 %}{{ a | replace('x', a) }}",
    "join method": "{% set a = 'x' * 1000000 %}{{ a.join(range(100000) | map('string')) }}",
    "join filter": "{% set a = 'x' * 1000000 %}{{ range(100000) | join(a) }}",
    "sum of lists": "{{ [range(1000) | list] * 1000 | sum(start=[]) }}",
    "round": "{{ 5 | round(-10**9) }}",
    "indent": "{{ ('\n' * 1000000) | indent(100000000) }}",
    "bytes": "{{ (1).to_bytes(10**10) }}",
    "tabs": "{{ '\t'.expandtabs(10**10) }}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep value": "{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "long source": "x" * (2 << 20),
    "insides": "{{ ''.__class__.__mro__ }}",
    "files": "{% include 'x' %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SECONDS", 1.0)
    monkeypatch.setattr(budget, "UNITS", budget.UNITS // 8)
    started = time.monotonic()
    with pytest.raises(TemplateError):
        Program(source).render({}, NOW)
    assert time.monotonic() - started < 20


def test_a_long_chat_is_within_the_budget() -> None:
    source = (
        "{%- set ns = namespace(text='', seen=[]) %}{%- for m in messages %}"
        "{%- set ns.seen = ns.seen + [m.role] %}"
        "{{- '<' + m.role + '>' + m.content | trim ~ '\n' }}{%- endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(300)]
    assert len(Program(source).render({"messages": messages}, NOW)) > 3_000_000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # trim_blocks, lstrip_blocks
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}", '{"b": "<é>", "a": [1, null, true]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ {'é': 1} | tojson(ensure_ascii=true, separators=(',', ':')) }}", '{"\\u00e9":1}'),
        ("{{ strftime_now('%d %b %Y') }}", "30 Nov 2026"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{{ '%s-%d' % ('a', 1) }} {{ '{}:{:>3}'.format(1, 2) }} {{ '%s' | format('x') }}", "a-1 1:  2 x"),
        ("{{ ['a', 'b'] | join(', ') }} {{ [{'k': 1}, {'k': 2}] | join('+', attribute='k') }}", "a, b 1+2"),
        ("{{ [1, 2] | sum }} {{ 'a\nb' | indent(2) }} {{ '<' | e | safe }}", "3 a\n  b &lt;"),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", "2"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}", "1"),
        ("{{ messages[-1]['content'].split('b')[0] ~ none ~ 1.5 }}", "aNone1.5"),
        ("{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call m('a') %}b{% endcall %}", "[ab]"),
        ("{{ missing }}{{ missing is defined }}", "False"),
        ("{{ 7 // 2 }} {{ 7 % 3 }} {{ 2 ** 3 }} {{ 'ab' * 2 }} {{ [1] + [2] }}", "3 1 8 abab [1, 2]"),
    ],
)
def test_templates_mean_what_they_mean_elsewhere(source: str, expected: str) -> None:
    variables = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "abc"}]}
    assert Program(source).render(variables, NOW) == expected
