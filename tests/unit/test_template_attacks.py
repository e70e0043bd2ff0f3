"""Templates are untrusted programs: no way to the interpreter, and no way to eat the machine."""

from __future__ import annotations

import logging
import threading
import time
import tracemalloc

import pytest

from neoserve.text.render_budget import RenderLimits
from neoserve.text.template import ChatTemplate
from neoserve.types.errors import InvalidRequestError

from .tiny_tokenizers import byte_level_metadata, tokenizer

SUBJECT = tokenizer(byte_level_metadata())
LIMITS = RenderLimits(operations=50_000, characters=1_000_000, total_characters=4_000_000, seconds=2.0)
CHAT = [{"role": "user", "content": "hi"}]
GROW = "{% set ns = namespace(v=START) %}{% for i in range(99) %}{% set ns.v = STEP %}{% endfor %}{{ ns.v }}"


def render(text: str, limits: RenderLimits = LIMITS) -> str:
    return ChatTemplate({"default": text}, SUBJECT, limits=limits).render(CHAT).text


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ namespace(__class__=1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('')[9999] }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': ''})[9999] }}",
        "{{ messages|map(attribute='__class__')|list|first|attr('mro')() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages[0].pop('role') }}",
    ],
)
def test_the_interpreter_is_out_of_reach(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"not allowed|failed on this chat"):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ x.__class__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ namespace.__init__ }}",
        "{{ dict.__call__ }}",
        "{{ ''.join.__self__ }}",
        "{{ messages[0].items().__class__ }}",
    ],
)
def test_what_is_not_refused_is_undefined_and_prints_nothing(text: str) -> None:
    assert render(text) == ""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{% include '/etc/passwd' %}", "include"),
        ("{% import 'os' as os %}", "import"),
        ("{% from 'os' import path %}", "fromimport"),
        ("{% extends 'base' %}", "extends"),
        ("{% do x() %}", "do"),
        ("{% for %}", "valid"),
        ("{{ 'a' | nofilter }}", "nofilter"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "compiled"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "compiled"),
    ],
)
def test_what_does_not_compile_is_reported_at_load_and_refused_with_the_reason(
    text: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        subject = ChatTemplate({"default": text}, SUBJECT)
    assert word in caplog.text
    assert "completions are not affected" in caplog.text
    with pytest.raises(InvalidRequestError, match=word) as caught:
        subject.render(CHAT)
    assert caught.value.code == "chat_template_error"


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [1] * 1000000000 }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ '\t'.expandtabs(1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ 'a' | indent('x' * 900000, true) | indent('y' * 900000, true) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 1000000000) }}",
        "{{ '{x:01000000000}'.format_map({'x': 1}) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000f' % 1.5 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ ('a' * 1000).replace('a', 'b' * 10000) }}",
        "{{ ('a' * 1000) | replace('a', 'b' * 10000) }}",
        "{{ ('b' * 10000).join(['a'] * 1000) }}",
        "{{ (['a'] * 1000) | join('b' * 10000) }}",
        "{{ [1] | batch(1000000000, 0) | list }}",
        "{{ [1] | slice(1000000000) | list }}",
        "{{ 1.5 | round(1000000000) }}",
        "{{ 2 ** 99999 }}",
        "{{ (10 ** 1000) * (10 ** 1000) }}",
        "{{ {'a': 1} | tojson(indent=1000000) }}",
        "{{ strftime_now('%Y' * 1000) }}",
        GROW.replace("START", "'ab'").replace("STEP", "ns.v ~ ns.v"),
        GROW.replace("START", "'ab'").replace("STEP", "ns.v + ns.v"),
        GROW.replace("START", "'ab'").replace("STEP", "ns.v * 2"),
        GROW.replace("START", "'ab'").replace("STEP", "'%s%s' % (ns.v, ns.v)"),
        GROW.replace("START", "'ab'").replace("STEP", "'{0}{0}'.format(ns.v)"),
        GROW.replace("START", "[1]").replace("STEP", "ns.v + ns.v"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.v, ns.v]"),
        GROW.replace("START", "[1]").replace("STEP", "(ns.v, ns.v)"),
        GROW.replace("START", "[1]").replace("STEP", "{'a': ns.v, 'b': ns.v}"),
        GROW.replace("START", "[1]").replace("STEP", "dict(a=ns.v, b=ns.v)"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.v] | batch(2, ns.v) | list"),
        GROW.replace("START", "[1]").replace("STEP", "[ns.v, ns.v] | tojson"),
        "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
        "{% macro m() %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endmacro %}{% set x = m() %}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
    ],
)
def test_what_would_be_huge_is_stopped_before_it_is_made(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=r"was stopped|failed on this chat") as caught:
            render(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "chat_template_error"
    assert peak < 64 * LIMITS.characters


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
        "{% for a in range(99999) if false %}{% else %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(99) %}{{ m(n + 1) }}{% endfor %}{% endmacro %}{{ m(0) }}",
        "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
        "{% for a in 'x' * 99999 %}{{ a | upper }}{% endfor %}",
        "{% for a in range(99999) %}{% if loop.last %}{% endif %}{% endfor %}",
        "{% for a in range(100001) %}{% endfor %}",
    ],
)
def test_endless_work_is_stopped(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"was stopped|failed on this chat"):
        render(text)


def test_other_threads_run_while_a_template_spins() -> None:
    ticks = 0
    done = threading.Event()

    def work() -> None:
        with pytest.raises(InvalidRequestError, match="operations"):
            render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
        done.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not done.wait(0.001):
        ticks += 1
    worker.join()
    assert ticks > 3


def test_the_time_limit_counts_work_that_takes_few_operations() -> None:
    limits = RenderLimits(operations=10**9, total_characters=10**12, seconds=0.2)
    with pytest.raises(InvalidRequestError, match=r"more than 0\.2 s of processor time"):
        render("{% for a in range(99999) %}{{ range(9999) | list | length }}{% endfor %}", limits)


def test_a_rendering_does_not_spend_the_next_one_s_budget() -> None:
    subject = ChatTemplate({"default": "{% for a in range(40000) %}{% endfor %}done"}, SUBJECT, limits=LIMITS)
    for _ in range(3):
        assert subject.render(CHAT).text == "done"


def test_an_exception_of_the_template_is_the_error_s_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"^no tools, please$") as caught:
        render("{{ raise_exception('no tools, please') }}")
    assert (caught.value.param, caught.value.code) == ("messages", "chat_template_error")


@pytest.mark.parametrize(
    "text", ["{{ x.y }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ messages[9].role }}", "{{ x() }}"]
)
def test_a_template_that_fails_is_an_error_of_the_request(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="'default' failed on this chat"):
        render(text)


def test_a_long_chat_is_well_within_the_limits() -> None:
    chat = [{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(2000)]
    text = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content | trim }}\n{% endfor %}{{ messages | tojson }}"
    start = time.thread_time()
    rendered = ChatTemplate({"default": text}, SUBJECT).render(chat).text
    assert len(rendered) > 4_000_000
    assert time.thread_time() - start < 5.0
