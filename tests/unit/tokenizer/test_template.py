"""Chat templates render as Hugging Face's do, and a hostile one is refused or stopped in time."""

from __future__ import annotations

import json
import time

import pytest

from mlxinfer.errors import ContextLengthError, InvalidRequestError, ModelFileError
from mlxinfer.tokenizer.template import MAX_TEMPLATE_CHARS, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi <b>"}]


def render(source: str, **variables) -> str:
    return ChatTemplate(source).render({"messages": MESSAGES, **variables})


def test_blocks_are_trimmed_as_hugging_face_trims_them() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n") == "user\n"


def test_break_and_generation_tags_work() -> None:
    source = "{% for m in [1, 2] %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source) == "1"


def test_tojson_is_plain_json_with_keywords() -> None:
    value = {"b": "<é>", "a": [1]}
    assert render("{{ v|tojson }}", v=value) == json.dumps(value, ensure_ascii=False)
    assert render("{{ v|tojson(indent=2, sort_keys=true) }}", v=value) == json.dumps(
        value, ensure_ascii=False, indent=2, sort_keys=True
    )


def test_everyday_expressions_work() -> None:
    source = (
        "{{ messages|length }}{{ loop is defined }}{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
        "{{ 'a' ~ 1 ~ none }}{{ 'x' in 'xyz' }}{{ messages[0]['content'].split()[0]|upper }}{{ ['a', 1]|join(',') }}"
        "{{ dict(a=1)['a'] }}{{ 'abc'|replace('b', 'd') }}{{ '%s-%02d'|format('n', 3) }}"
        "{{ 'x'.startswith('x') }}{{ 7 % 4 * 2 }}"
    )
    assert render(source) == "1False2a1NoneTrueHIa,11adcn-03True6"


def test_loop_variables_know_first_last_and_length() -> None:
    body = "{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index0 }};"
    source = "{% for i in range(3) if i != 1 %}" + body + "{% endfor %}"
    assert render(source) == "TrueFalse20;FalseTrue21;"


def test_strftime_now_gives_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_raise_exception_becomes_an_invalid_request_with_its_message() -> None:
    with pytest.raises(InvalidRequestError, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{{ messages|attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ dict.mro() }}",
        "{{ dict.__subclasses__() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__init__=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_a_template_that_reaches_for_internals_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"refused|unsafe|failed"):
        assert not render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1, 2, 3]) }}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ ['a' * 1000000] * 1000000 }}",
        "{{ (['a' * 1000000] * 1000)|join }}",
        "{{ (['a' * 1000000] * 1000)|tojson }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'|indent(1000000000) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ ('a' * 10000000).replace('a', 'b' * 10000) }}",
        "{{ 9**9**9**9 }}",
        "{{ range(10000000) }}",
        "{% for i in range(9999) %}{{ 'a' * 100000 }}{% endfor %}",
    ],
)
def test_a_template_that_would_not_end_or_fill_memory_is_stopped(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        render(source)
    assert time.perf_counter() - start < 15  # the budget is 5 s; machines that run tests are slow


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a'|center(9) }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_a_template_that_does_not_compile_is_a_model_file_error(source: str) -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate(source)


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(ModelFileError, match="at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))


def test_messages_the_template_cannot_take_are_an_invalid_request() -> None:
    with pytest.raises(InvalidRequestError, match="chat template failed"):
        render("{{ messages[0]['nope'].strip() }}")
    with pytest.raises(InvalidRequestError, match="TypeError"):
        render("{{ 'a' + 1 }}")


NESTED = "{% set ns = namespace(l=[], t=()) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        NESTED + "{{ ns.l }}",
        NESTED + "{{ ns.l|tojson }}",
        NESTED + "{{ ns.l|string }}",
        NESTED + "{{ ns.l == ns.l[:] }}",
        NESTED + "{{ [] in ns.l }}",
        NESTED + "{{ ns.l|sort }}",
        NESTED.replace("[ns.l, ns.l]", "(ns.l, ns.l)") + "{{ {ns.l: 1} }}",
        NESTED.replace("[ns.l, ns.l]", "ns.l + [ns.l]") + "{{ ns.l }}",
        NESTED.replace("[ns.l, ns.l]", "dict(a=ns.l, b=ns.l)") + "{{ ns.l }}",
        NESTED.replace("[ns.l, ns.l]", "{'a': ns.l, 'b': ns.l}") + "{{ ns.l }}",
        NESTED.replace("[ns.l, ns.l]", "[ns.l, ns.l]|batch(2)|list") + "{{ ns.l }}",
        "{% set ns = namespace(t=()) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}",
        "{{ ([[1] * 100000] * 3000)|tojson }}",
        "{{ ([[1] * 1000] * 900)|sum(start=[]) }}",
        "{{ ('x' * 10000000).translate({120: 'y' * 1000}) }}",
        "{{ 'x'.maketrans('a', 'b') }}",
        "{{ 'x' * 30000000 }}",
        "{{ ('{0}' * 10000).format('x' * 10000000) }}",
        "{{ ('%(a)s' * 10000) % {'a': 'x' * 10000000} }}",
        "{{ ('x\n' * 5000000)|indent(1000) }}",
        "{% set s = 'x' * 16000000 %}{% set b %}" + "{{ s }}" * 1000 + "{% endset %}",
        "{% set b %}{% for i in range(90000) %}" + "x" * 100_000 + "{% endfor %}{% endset %}",
        "{% set s = range(99999)|list %}{{ s|select('in', s|reverse|list)|list|length }}",
        "{{ ('x' * 10000000).join(range(100000)|map('string')) }}",
    ],
)
def test_shared_references_and_many_copies_are_stopped_within_the_time_limit(source: str) -> None:
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError):
        render(source)
    assert time.perf_counter() - start < 8  # the limit is 3 s


def test_text_longer_than_the_caller_can_use_is_a_context_length_error() -> None:
    with pytest.raises(ContextLengthError):
        ChatTemplate("{{ 'x' * 1000 }}").render({}, max_chars=999)
    assert len(ChatTemplate("{{ 'x' * 1000 }}").render({}, max_chars=1000)) == 1000


QUADRATIC = [
    "{{ ('a' * 8000000).strip('b' * 8000000 + 'a') }}",
    "{{ ('a' * 8000000)|trim('b' * 8000000 + 'a') }}",
    "{{ ('a' * 8000000).rfind('ab' + 'a' * 4000000) }}",
    "{{ ('a' * 8000000).rsplit(sep='ab' + 'a' * 4000000) }}",
    "{{ ('a' * 8000000).rpartition('ab' + 'a' * 4000000) }}",
    "{{ (('f' * 8000000)|int(base=16)) // (('f' * 4000000)|int(base=16)) }}",
    "{% set ns = namespace(n=2 ** 100) %}{% for i in range(99999) %}{% set ns.n = ns.n + ns.n %}{% endfor %}",
    "{{ ('a ' * 7000000)|title }}",
    "{{ ('é' * 7000000)|urlencode }}",
    "{{ range(99999)|sort(attribute='real,' * 50 + 'real') }}",
    "{{ range(99999)|map(attribute='real' + '.real' * 100)|list }}",
    "{{ {}.fromkeys(range(99999)) }}",
    "{{ dict(range(99999)|batch(2)) }}",
    "{{ namespace(range(99999)|batch(2)|list) }}",
    # Integers whose hashes are all 0: each goes past all before it.
    "{% set b %}{% for i in range(99999) %}{{ i * 2305843009213693951 }},{% endfor %}{% endset %}"
    "{{ (b.split(',')|map('int')|unique|list + b.split(',')|map('int')|unique|list)|length }}",
]


@pytest.mark.parametrize("source", QUADRATIC)
def test_a_call_that_would_hold_all_threads_for_minutes_is_refused(source: str) -> None:
    """Each takes minutes to hours, most of them in one call with Python's lock held; then the file's timeout kills."""
    with pytest.raises(InvalidRequestError, match=r"stopped|refused"):
        render(source)


def test_everyday_texts_are_split_and_trimmed_from_the_right() -> None:
    source = "{{ m.rsplit('</think>', 1)[-1].strip('\\n ') }}|{{ m|trim('x') }}|{{ 7 // 2 }}{{ 7 - 2 }}{{ 8 / 2 }}"
    assert ChatTemplate(source).render({"m": "xa</think>\n b x"}) == "b x|a</think>\n b |354.0"
