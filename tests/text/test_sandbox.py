"""A hostile template is refused quickly, with one sentence, and uses up nothing."""

import re
import resource
import time

import pytest

from jitllm.errors import ChatTemplateError
from jitllm.text import ChatTemplate, sandbox
from tests.text.vocabularies import byte_level, tokenizer

_BYTES = tokenizer(byte_level())
_MESSAGES = [{"role": "user", "content": "hi"}] * 3


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _refusal(template: str) -> str:
    begin, peak = time.thread_time(), _peak_kib()
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(template).encode(_BYTES, _MESSAGES)
    assert time.thread_time() - begin < 5
    assert _peak_kib() - peak < 300 << 10
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__ }}",
        "{{ self.__dict__ }}",
        "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | groupby('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ dict.mro() }}",
    ],
)
def test_what_is_not_on_the_lists_may_not_be_used(template: str) -> None:
    assert "it may not use" in _refusal(template)


@pytest.mark.parametrize("name", ["attr", "center", "format", "pprint", "random", "xmlattr"])
def test_filters_that_are_not_on_the_list_are_not_there(name: str) -> None:
    assert f"No filter named '{name}'" in _refusal(f"{{{{ 'a' | {name} }}}}")


@pytest.mark.parametrize(
    "template",
    [
        "{% include 'x' %}",
        "{% import 'x' as x %}",
        "{% from 'x' import y %}",
        "{% extends 'x' %}",
        "{% for %}",
        "{{ ",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
)
def test_a_template_that_is_none_or_wants_another_is_refused(template: str) -> None:
    assert _refusal(template).startswith("the chat template cannot be used: ")


def test_a_template_of_a_megabyte_is_refused() -> None:
    assert "has 1000000 characters; at most" in _refusal("a" * 1_000_000)


_GROW = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * [0] }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ [1] | batch(1000000000, 'x') | list }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ strftime_now('%Y' * 1000) }}",
        "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% set x %}{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}{% endset %}",
        "{% set x = 'a' * 4000000 %}" + "{% set X = x ~ 1 %}" * 5000,
        _GROW.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
        _GROW.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
        _GROW.replace("START", "'aa'").replace("STEP", "ns.x.replace('a', 'aaaaaaaa')"),
        _GROW.replace("START", "'aa'").replace("STEP", "ns.x | replace('', 'aaaaaaaa')"),
        _GROW.replace("START", "'aa'").replace("STEP", "ns.x.join(ns.x)"),
        _GROW.replace("START", "'aa'").replace("STEP", "ns.x | join(d=ns.x)"),
        _GROW.replace("START", "7").replace("STEP", "ns.x * ns.x"),
    ],
)
def test_values_that_are_too_large_are_not_made(template: str) -> None:
    assert "it makes a value that is too large" in _refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        _GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
        _GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]") + "{{ ns.x }}",
        _GROW.replace("START", "[1]").replace("STEP", "{'a': ns.x, 'b': ns.x}"),
        _GROW.replace("START", "[1]").replace("STEP", "(ns.x, ns.x)") + "{{ ns.x == ns.x }}",
    ],
)
def test_a_template_that_does_not_come_to_an_end_is_ended(template: str) -> None:
    assert re.search("come to an end|too large|Range too big|recursion depth", _refusal(template))


def test_a_namespace_that_holds_itself_is_not_followed() -> None:
    template = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns | string }}"
    ids = ChatTemplate(template).encode(_BYTES, _MESSAGES)
    assert _BYTES.decode(ids) == "<namespace><namespace>"


def test_a_long_message_is_no_large_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SIZE", 100)
    content = "word " * 1000
    template = ChatTemplate("{{ '[' + messages[0].content | trim ~ ']' }}")
    ids = template.encode(_BYTES, [{"role": "user", "content": content}])
    assert _BYTES.decode(ids) == f"[{content.strip()}]"
    with pytest.raises(ChatTemplateError, match="too large"):
        ChatTemplate("{{ 'a' * 10000 }}").encode(_BYTES, _MESSAGES)


def test_limits_hold_for_each_rendering_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    template = ChatTemplate("{% for i in range(900) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(3):
        assert template.encode(_BYTES, _MESSAGES) == _BYTES.encode("hi")
