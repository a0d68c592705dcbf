"""Grammars that force calls: what they accept and refuse, and that the parser reads whatever they let through."""

import json
import random
from functools import cache

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxinfer.errors import InvalidRequestError
from mlxinfer.tokenizer.replies.lark import functions_of
from mlxinfer.types import Grammar
from tests.unit.tokenizer.replies.models import MODELS, TOOLS, backend, format_of
from tests.unit.tokenizer.replies.reading import parse, summary

SCHEMAS = dict(functions_of(TOOLS))
JSON_ARGUMENTS = ["hermes", "llama3", "mistral", "mistral_named", "deepseek_v3", "deepseek_v31", "kimi_k2", "harmony"]
JSON_ARGUMENTS += ["phi4", "phi4_objects", "granite", "nemotron", "jamba", "plain"]


def matcher(name, grammar):
    made = LLMatcher(_tokens_for_llguidance(name), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


@cache
def _tokens_for_llguidance(name):
    tokens = backend(name)
    return LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("</s>"))


def accepts(name, grammar, text):
    made = matcher(name, grammar)
    ids = backend(name).encode(text, add_special_tokens=False).ids
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()


def tool(name="f", **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def written(name, rng, grammar, limit=200):
    """A random reply that the grammar allows, by steps of allowed tokens; None when it gets too long."""
    made, tokens = matcher(name, grammar), backend(name)
    end = tokens.token_to_id("</s>")
    ids = []
    while len(ids) < limit:
        if made.is_accepting() and (made.is_stopped() or rng.random() < 0.5):
            return tokens.decode(ids, skip_special_tokens=False)
        bits = made.compute_bitmask()
        allowed = [i for i in range(tokens.get_vocab_size()) if bits[i // 8] >> (i % 8) & 1 and i != end]
        # Plain characters and markup rather than long white space or bytes that may never become a character.
        likely = [i for i in allowed if (t := tokens.decode([i], skip_special_tokens=False)) and t.isprintable()]
        closing = [
            i for i in likely if tokens.id_to_token(i) in ('"', "}", "</", "<", ">") or tokens.id_to_token(i)[0] == "<"
        ]
        choices = closing if closing and rng.random() < 0.4 else likely or allowed
        ids.append(rng.choice(choices))
        assert made.consume_token(ids[-1])
    return None


@pytest.mark.parametrize("name", MODELS)
def test_a_call_as_the_template_writes_it_is_accepted_and_nothing_else(name):
    form, one = format_of(name), MODELS[name].one
    for parallel in (False, True):
        grammar = form.forced_calls(TOOLS, parallel=parallel)
        assert accepts(name, grammar, one)
        for wrong in (
            one.replace("get_weather", "get_wether"),
            one.replace("city", "town"),
            one.replace("3", "x"),
            one.replace("3", '"3"'),
            one + "x",
            one[:-1],
            "Hello",
            "",
            " " + one,
        ):
            assert not accepts(name, grammar, wrong), wrong


@pytest.mark.parametrize("name", [n for n in MODELS if MODELS[n].two])
def test_several_calls_are_accepted_only_in_parallel(name):
    form, two = format_of(name), MODELS[name].two
    assert accepts(name, form.forced_calls(TOOLS, parallel=True), two)
    assert not accepts(name, form.forced_calls(TOOLS, parallel=False), two)


@pytest.mark.parametrize("name", MODELS)
def test_whatever_the_grammar_lets_through_is_read_as_valid_calls(name):
    form, rng = format_of(name), random.Random(name)
    seen = 0
    for _ in range(8):
        parallel = rng.random() < 0.5
        text = written(name, rng, form.forced_calls(TOOLS, parallel=parallel))
        if text is None:
            continue
        calls = summary(parse(form, text, tools=TOOLS))
        assert calls, text
        assert parallel or len(calls) == 1
        for call in calls:
            assert isinstance(call, tuple), (text, calls)
            if name in JSON_ARGUMENTS:
                jsonschema.validate(call[1], SCHEMAS[call[0]])
            assert call[0] == "now" or set(call[1]) <= {"city", "days"}
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("name", [n for n in MODELS if format_of(n).has_reasoning])
def test_reasoning_may_come_before_a_forced_call(name):
    form, one = format_of(name), MODELS[name].one
    start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    if form.think:
        start, end = form.think.start, form.think.end + "\n\n"
    closed = "<|start|>assistant" if name == "harmony" else ""
    grammar = form.calls_constrained(TOOLS, closed, parallel=False).text
    assert accepts(name, grammar, f"{start}hm {{\n{end}{one}")
    assert accepts(name, grammar, one)
    assert not accepts(name, grammar, f"{start}hm{end}Hello")
    assert not accepts(name, grammar, f"{start}hm {one}")
    assert not accepts(name, form.forced_calls(TOOLS, parallel=False), f"{start}hm{end}{one}")
    if form.think:
        opened = form.calls_constrained(TOOLS, start + "\n", parallel=False).text
        assert accepts(name, opened, f"hm {{\n{end}{one}")
        assert not accepts(name, opened, one)
        assert form.reasoning_prefix(f"{start}\n{end}") is None
        assert form.reasoning_prefix(start) is not None


@pytest.mark.parametrize("name", ["hermes", "harmony", "plain", "mistral"])
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "integer"}'), "12", "x"),
        (Grammar("json_object"), '{"a": 1}', "[1]"),
        (Grammar("regex", "a/b\\/[\n]?"), "a/b/\n", "a/c"),
        (Grammar("choice", '["a\\"b", "c"]'), 'a"b', "b"),
    ],
)
def test_reasoning_and_framing_may_come_before_structured_text(name, grammar, good, bad):
    form = format_of(name)
    whole = form.constrained(grammar, "<|start|>assistant" if name == "harmony" else "")
    framing = "<|channel|>final<|message|>" if name == "harmony" else ""
    if whole == grammar:
        assert name == "plain"
        return
    reasoning = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" if name == "harmony" else ""
    if form.think:
        reasoning = f"{form.think.start}hm{form.think.end}\n\n"
    for before in ("", reasoning):
        assert accepts(name, whole.text, before + framing + good)
        assert not accepts(name, whole.text, before + framing + bad)
    without = form.constrained(grammar, "<|start|>assistant" if name == "harmony" else "", reasons=False)
    assert without == grammar or not accepts(name, without.text, reasoning + framing + good)


def test_a_grammar_cannot_be_extended_by_a_schema_that_is_no_json():
    with pytest.raises(InvalidRequestError, match="not JSON"):
        format_of("hermes").constrained(Grammar("json_schema", '{}\nstart: "x"'), "")


@pytest.mark.parametrize("name", JSON_ARGUMENTS)
@pytest.mark.parametrize("strange", ['q"u', "back\\slash", "/* x */", "a\nb: c", "<[1]>", "🙂é", "%json {}", "\x07"])
def test_a_strange_name_stays_one_name(name, strange):
    grammar = format_of(name).forced_calls([tool(strange, type="object")], parallel=False)
    assert not accepts(name, grammar, MODELS[name].one)
    if name in ("hermes", "llama3", "plain", "phi4", "mistral"):
        shape = MODELS[name].one.replace('"get_weather"', json.dumps(strange, ensure_ascii=False))
        assert accepts(name, grammar, shape)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in JSON_ARGUMENTS])
def test_a_name_that_would_end_the_markup_is_refused(name):
    for strange in ('q"u', "a>b", "a b", "x=y", "a{"):
        with pytest.raises(InvalidRequestError, match="can't write the name"):
            format_of(name).forced_calls([tool(strange, type="object")], parallel=False)
        with pytest.raises(InvalidRequestError, match="can't write the name"):
            format_of(name).forced_calls([tool("f", type="object", properties={strange: {}})], parallel=False)


@pytest.mark.parametrize("name", JSON_ARGUMENTS)
@pytest.mark.parametrize("function", [{"name": "get_weather"}, {"name": "get_weather", "parameters": {}}])
def test_without_parameters_any_object_will_do(name, function):
    grammar = format_of(name).forced_calls([{"type": "function", "function": function}], parallel=False)
    assert accepts(name, grammar, MODELS[name].one)


@pytest.mark.parametrize("name", [n for n in MODELS if n not in JSON_ARGUMENTS])
def test_without_parameters_markup_may_have_any(name):
    grammar = format_of(name).forced_calls([tool("get_weather")], parallel=False)
    one = MODELS[name].one.replace('type="number"', 'type="string"')
    assert accepts(name, grammar, one)


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [{}],
        [{"function": {}}],
        [{"function": {"name": ""}}],
        [{"function": {"name": 5}}],
        [{"function": "f"}],
        [tool(type="array")],
        [tool(type=["string", "null"])],
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "harmony"])
def test_tools_that_cannot_be_called_are_refused(name, tools):
    with pytest.raises(InvalidRequestError) as caught:
        format_of(name).forced_calls(tools, parallel=False)
    assert caught.value.param == "tools"


def test_values_in_markup_are_json_by_their_schema_or_text():
    parameters = {
        "type": "object",
        "$defs": {"level": {"enum": ["low", "high"]}, "point": {"type": "object", "required": ["x"]}},
        "properties": {
            "text": {"type": "string"},
            "level": {"$ref": "#/$defs/level"},
            "at": {"$ref": "#/$defs/point"},
            "many": {"type": "array", "items": {"type": "integer"}},
            "on": {"type": "boolean"},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["level"],
    }
    name = "qwen3_coder"
    grammar = format_of(name).forced_calls([tool("f", **parameters)], parallel=False)

    def call(**values):
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"

    assert accepts(name, grammar, call(level="low"))
    assert accepts(
        name, grammar, call(text="a\n</b> {", level="high", at='{"x": 1}', many="[1, 2]", on="true", n="null")
    )
    assert not accepts(name, grammar, call(text="a"))
    for wrong in (
        {"level": "mid"},
        {"level": "low", "at": "{}"},
        {"level": "low", "many": '["a"]'},
        {"level": "low", "n": "x"},
    ):
        assert not accepts(name, grammar, call(**wrong))
    assert not accepts(name, grammar, call(level="low", other="1"))


def test_gemma_writes_nested_values_and_function_gemma_refuses_them():
    nested = tool(
        "f", type="object", properties={"a": {"type": "array"}, "b": {"type": "object"}, "c": {"enum": ["x"]}}
    )
    grammar = format_of("gemma4").forced_calls([nested], parallel=False)
    assert accepts(
        "gemma4", grammar, '<|tool_call>call:f{a:[1,<|"|>]<|"|>,{k:null}],b:{k:[]},c:<|"|>x<|"|>}<tool_call|>'
    )
    assert accepts("gemma4", grammar, "<|tool_call>call:f{b:{}}<tool_call|>")
    assert accepts("gemma4", grammar, "<|tool_call>call:f{}<tool_call|>")
    for wrong in ("{a:{}}", '{c:<|"|>y<|"|>}', "{b:{}a:[]}", "{,}"):
        assert not accepts("gemma4", grammar, f"<|tool_call>call:f{wrong}<tool_call|>")
    with pytest.raises(InvalidRequestError, match="can't write an array"):
        format_of("function_gemma").forced_calls([nested], parallel=False)


def test_the_arguments_of_a_forced_call_are_held_to_their_schema_as_a_reply_would_be() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}, "x-guidance": {"lenient": True}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    grammar = format_of("plain").forced_calls([tool], parallel=False)
    assert '"lenient"' not in grammar
    assert "{0,20}" in grammar
