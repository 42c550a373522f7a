"""Templates that would run for hours, fill the memory or leave the sandbox are refused soon."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from quail.errors import ModelError
from quail.models.chat import ChatPieces, chat_pieces

DOUBLING = "{% set x = 'aaaaaaaa' %}" + "{% set x = x OP x %}" * 60 + "{{ x }}"
LISTS = "{% set a = ['x'] %}" + "{% set a = [a, a] %}" * 60


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            marks=pytest.mark.slow,
        ),
        "{% for a in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
        DOUBLING.replace("OP", "~"),
        DOUBLING.replace("OP", "+"),
        LISTS + "{{ a }}",
        LISTS + "{{ a | tojson }}",
        LISTS + "{{ a | string }}",
        LISTS + LISTS.replace("set a", "set b").replace("[a, a]", "[b, b]") + "{{ a == b }}",
        LISTS.replace("[a, a]", "(a, a)") + "{{ a }}",
        LISTS.replace("[a, a]", "{'x': a, 'y': a}") + "{{ a }}",
        LISTS.replace("[a, a]", "dict(x=a, y=a)") + "{{ a }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 'a' * 1000000000000 }}",
        "{{ 1000000000000 * 'a' }}",
        "{{ ([1] * 1000000000) | length }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ '\t'.expandtabs(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a\nb' | indent(1000000000) }}",
        "{{ [[1]] | tojson(indent=1000000000) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
        "{{ ('b' * 100000).join('a' * 100000) }}",
        "{{ lipsum(1000000000) }}",
        "{% for a in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
        "{% set x %}{% for a in range(99999) %}{{ 'a' * 5000 }}{% endfor %}{% endset %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].__getitem__.__self__.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
        "x" * 10_000_000,
    ],
)
def test_hostile_templates(template: str) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ModelError, match="template"):
            chat_pieces(template, bos_token=None, eos_token=None, where="x")
        assert time.process_time() - started < 20
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_what_templates_do_is_still_done() -> None:
    template = (
        "{% set ns = namespace(n=0) %}{% macro part(m, name='user') %}[{{ name ~ ':' ~ m | trim }}]{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + loop.index %}"
        "{{ part(m['content'].split('</think>')[-1].lstrip('\n')) }}{% endfor %}"
        "{{ {'a': [1, ns.n]} | tojson(indent=2) }}{{ '%s-%d' % ('b', 2) }}{{ ', '.join(['c', 'd']) }}"
        "{% set text %}{{ '=' * 3 }}{% endset %}{{ text + 'e'.replace('e', 'ff') | upper }}"
    )
    assert chat_pieces(template, bos_token=None, eos_token=None, where="x") == ChatPieces(
        "[user:", ']{\n  "a": [\n    1,\n    1\n  ]\n}b-2c, d===FF'
    )
