"""Chat templates that mean no good: bombs of time and size, and ways out of the sandbox."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support.patience import SOON_SECONDS

from engine.errors import RequestError
from engine.text.chat import fill_template, render_chat

DOUBLING = (
    "{% set n = namespace(x=START) %}{% for i in range(99) %}{% set n.x = NEXT %}{% endfor %}"
)
NINE_MILLION = "{% set x = 'a' * 9000000 %}"
BOMBS = {
    "product": "{{ 'a' * 10000000000 }}",
    "product of a list": "{{ ([1] * 10000000000) | length }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "concatenation": DOUBLING.replace("START", "'abcd'").replace("NEXT", "n.x ~ n.x"),
    "sum": DOUBLING.replace("START", "'abcd'").replace("NEXT", "n.x + n.x"),
    "sum of lists": DOUBLING.replace("START", "[1]").replace("NEXT", "n.x + n.x"),
    "square": DOUBLING.replace("START", "99").replace("NEXT", "n.x * n.x"),
    "width": "{{ '%10000000000d' % 1 }}",
    "asked width": "{{ '%*d' % (10000000000, 1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format by name": "{{ '{x:10000000000}'.format_map({'x': 1}) }}",
    "asked format": "{{ '{:{}}'.format(1, 10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "filter": "{{ 'a' | center(10000000000) }}",
    "mapped filter": "{{ ['a'] | map('center', 10000000000) | list }}",
    "indent": "{{ {'a': 1} | tojson(indent=10000000000) }}",
    "replace": NINE_MILLION + "{{ x | replace('a', x) }}",
    "method replace": NINE_MILLION + "{{ x.replace('a', x) }}",
    "join": NINE_MILLION + "{{ range(99999) | join(x) }}",
    "method join": NINE_MILLION + "{{ x.join(['a'] * 99999) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "output": NINE_MILLION + "{% for a in range(99999) %}{{ x }}{% endfor %}",
    "output of a macro": NINE_MILLION
    + "{% macro m() %}{% for a in range(99999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "translate": NINE_MILLION + "{{ 'aa'.translate({97: x}) }}",
}
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "callers": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "{% endcall %}" * 40,
}
WAYS_OUT = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ messages | attr('__class__') | attr('__base__') }}",
    "{{ (''|attr('\\x5f\\x5fclass\\x5f\\x5f')).mro() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{% set x = messages.append(1) %}{{ x }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ (lambda: 1)() }}",
]
CHAT = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_be_too_large_is_refused(name: str) -> None:
    tracemalloc.start()
    try:
        began = time.monotonic()
        with pytest.raises(RequestError, match="chat template refuses"):
            render_chat(BOMBS[name], CHAT, {})
        assert time.monotonic() - began < SOON_SECONDS
        assert tracemalloc.get_traced_memory()[1] < 500 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_never_end_is_refused(name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"longer than 0\.2 s, the limit|calls itself"):
        fill_template(ENDLESS[name], {"messages": CHAT}, seconds=0.2)
    assert time.monotonic() - began < SOON_SECONDS


@pytest.mark.parametrize("source", WAYS_OUT)
def test_nothing_behind_the_sandbox_is_reached(source: str) -> None:
    """Each is an error, or undefined, which is empty."""
    try:
        text = render_chat(source, CHAT, {})
    except RequestError as error:
        text = str(error)
    assert not any(word in text for word in ("<class", "<module", "uid=", "root:", "{'__name"))
    assert CHAT == [{"role": "user", "content": "x"}]


def test_what_templates_do_is_done_as_ever() -> None:
    """Sums, formats and widths of usual size, loops with all that a loop knows."""
    source = """{%- macro show(m, n=7) %}{{ n }}:{{ m.role ~ '=' ~ m.content }}{% endmacro %}
{%- macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}
{%- for m in messages %}{{ show(m, loop.index + 1700000000) }}|{{ loop.length }}{{ loop.last }}
{%- if not loop.first %},{% else %}{{ loop.nextitem.role }}{% endif %}{% endfor %}
{{ '%s *%05d* 1234567890' % ('a', 5000000) }}{{ '{:>4} 12345678'.format('b') }}{{ 2 ** 10 * 3 }}
{{ 'ab' * 3 }}{{ [1, 2] + [3] }}{{ 'a-b-c'.replace('-', '+', 1) }}{{ ', '.join(['p', 'q']) }}
{{- messages | map(attribute='role') | join(', ') }}{{ ['x', 1] | join }}{{ none ~ 1.5 }}
{{ messages | join('+', attribute='content') }}{{ 'a.a' | replace('.', 'b') }}{{ 7 | default(0) }}
{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% else %}-{% endfor %}
{% for x in range(9) if x % 2 %}{{ loop.index }}{{ loop.cycle('odd', 'even') }}{% endfor %}
{% call(x) twice() %}{{ x }}{% endcall %}{{ 'a b' | title | center(9) | indent(2, true) }}"""
    chat = [*CHAT, {"role": "bot", "content": "y"}]
    stock = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render_chat(source, chat, {}) == stock.from_string(source).render(messages=chat)
