"""Limits of untrusted chat templates: on time, on size, and on what they can access."""

from __future__ import annotations

import pytest

from quire.errors import TemplateError
from quire.text.templates.chat_template import MAX_SOURCE_CHARS, ChatTemplate

pytestmark = pytest.mark.cpu

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **bounds: float) -> str:
    return ChatTemplate(source, {}, **bounds).render(USER)


def doubling(start: str, step: str, use: str) -> str:
    """A template that would double a value sixty times."""
    loop = "{% for i in range(60) %}{% set n.x = " + step + " %}{% endfor %}"
    return "{% set n = namespace(x=" + start + ") %}" + loop + "{{ " + use + " }}"


ENDLESS = {
    "empty loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "skipping loops": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "continue": "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "generation": "{% generation %}"
    + "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endgeneration %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "map": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "sort": "{% for a in range(99999) %}{{ range(9999) | list | sort | length }}{% endfor %}",
    "comparison": "{% set a = 'a' * 4000000 %}{% set b = a ~ '' %}{% for i in range(99999) %}{{ a == b }}{% endfor %}",
}  # fmt: skip

HUGE = {
    "times": "{{ 'a' * 10 ** 9 }}",
    "times, list": "{{ [0] * 10 ** 9 }}",
    "times, reversed": "{{ 1000000000 * 'a' }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": doubling("3", "n.x * n.x", "n.x"),
    "range": "{{ range(10 ** 9) | list }}",
    "plus": doubling("'ab'", "n.x + n.x", "n.x"),
    "plus, list": doubling("[1]", "n.x + n.x", "n.x"),
    "concatenation": doubling("'ab'", "n.x ~ n.x", "n.x"),
    "markup": doubling("'&' | safe", "n.x + n.x", "n.x"),
    "nested lists": doubling("[1]", "[n.x, n.x]", "n.x"),
    "nested tuples": doubling("(1,)", "(n.x, n.x)", "{n.x: 1}"),
    "nested dicts": doubling("{}", "{'a': n.x, 'b': n.x}", "n.x | tojson"),
    "nested views": doubling("{}", "{'a': n.x.items(), 'b': n.x.items()}", "n.x"),
    "nested calls": doubling("{}", "dict(a=n.x, b=n.x)", "n.x"),
    "nested arguments": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "nested keywords": "{% macro f() %}{{ f(a=kwargs, b=kwargs) }}{% endmacro %}{{ f() }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "endless recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "output": "{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "captured text": "{% set x %}{% for a in range(99999) %}" + "a" * 9000 + "{% endfor %}{% endset %}",
    "captured values": "{% macro f() %}{% for a in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}{{ f() }}",
    "slices": "{% set a = 'a' * 4000000 %}" + "".join(f"{{% set v{i} = a[1:] %}}" for i in range(999)),
    "center": "{{ 'a' | center(1000000000) }}",
    "methods": "{{ 'a'.zfill(1000000000) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "indent, text": "{{ ('a\n' * 99999) | indent('a' * 99999) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "replace, named": "{{ ('a' * 99999) | replace(old='', new='b' * 99999) }}",
    "replace, method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ range(9999) | join('a' * 9999) }}",
    "join, method": "{{ ('a' * 9999).join('b' * 9999) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format, repeated": "{{ ('{0}' * 9999).format('a' * 99999) }}",
    "format, precision": "{{ '{:.1000000000f}'.format(1.5) }}",
    "format, map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent, star": "{{ '%*d' % (1000000000, 1) }}",
    "percent, repeated": "{{ ('%(a)s' * 9999) % {'a': 'b' * 99999} }}",
    "percent, filter": "{{ '%1000000000d' | format(1) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "sum": "{{ ([[1] * 99] * 99) | sum(start=[]) }}",
    "json": "{{ ([1] * 99999) | tojson(indent=9999) }}",
    "json, separators": "{{ range(999) | list | tojson(separators=('a' * 99999, ':')) }}",
    "words": "{{ ('a ' * 2000000) | title | length }}",
    "backward search": "{{ ('a' * 4000000).rfind('ab' + 'a' * 999999) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 999999 + 'a') }}",
    "date": "{{ strftime_now('%Y' * 999) }}",
    "source": "a" * (MAX_SOURCE_CHARS + 1),
    "tokens": "{{ " + "1~" * 20_000 + "1 }}",
    "parentheses": "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "nested ifs": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "nested fors": "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
    "attributes": "{{ a" + ".a" * 5000 + " }}",
}  # fmt: skip

ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "item": "{{ ''['__class__']['__mro__'] }}",
    "filter": "{{ (''|attr('__class__')).__mro__ }}",
    "map": "{{ (['']|map(attribute='__class__')|list)[0].__mro__ }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "class globals": "{{ cycler.__init__.__globals__ }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "namespace, made": "{{ namespace(__class__=1) }}",
    "context": "{{ self._TemplateReference__context.vars }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a dict": "{{ messages[0].update({}) }}",
    "bytes": "{{ 'a'.encode() }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "import": "{% import 'os' as os %}",
    "lipsum": "{{ lipsum(n=99999) }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_is_bounded(name):
    with pytest.raises(TemplateError, match=r"ran longer than 0\.05 s"):
        render(ENDLESS[name], max_seconds=0.05)


@pytest.mark.parametrize("name", HUGE)
def test_size_is_bounded(name):
    # A size bound must hold on its own, long before the time bound would.
    with pytest.raises(TemplateError) as caught:
        render(HUGE[name], max_seconds=60)
    assert "ran longer" not in str(caught.value)


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_outside_is_reached(name):
    with pytest.raises(TemplateError):
        render(ESCAPES[name])


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ dict.fromkeys }}", "{{ ''.__class__ }}"])
def test_what_is_not_reached_prints_as_nothing(source):
    assert render(source) == ""


def test_output_has_its_own_bound():
    source = "{% for i in range(9) %}{{ 'a' * 10 }}{% endfor %}"
    assert len(render(source, max_chars=90)) == 90
    with pytest.raises(TemplateError, match="longer than 89 characters"):
        render(source, max_chars=89)


def test_long_conversations_fit():
    messages = [{"role": "user", "content": "x" * 1000}] * 1500
    source = (
        "{% set n = namespace(all=[]) %}{% for m in messages %}{% set n.all = n.all + [m] %}{{ m.content }}{% endfor %}"
    )
    assert len(ChatTemplate(source, {}, max_seconds=30).render(messages)) == 1_500_000
