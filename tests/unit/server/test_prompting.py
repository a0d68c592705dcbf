"""Grammars of replies that may think, answer in a given form or call a tool, checked with llguidance itself."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, cast

import llguidance
import pytest
import tokenizers

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatTask
from mlxinfer.server.prompting import prepare
from mlxinfer.tokenizer import Tokenizer
from mlxinfer.tokenizer.replies import TextPart, ToolCallEnd, ToolCallStart
from mlxinfer.types import Grammar, SamplingParams
from tests.unit.server.fake import FakeLLM
from tests.unit.server.test_chat_tools import TOOLS
from tests.unit.tokenizer import tiny

HERMES = (
    tiny.CHATML + '{% if tools %}{{ tools | tojson }} <tool_call>{"name": …, "arguments": …}</tool_call>{% endif %}'
)
THINKING = HERMES + "{% if add_generation_prompt %}<think>\n{% endif %}"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
THOUGHT = "it is 42 </think>\n\n"


@cache
def vocabulary() -> str:
    """A tokenizer.json whose markup is tokens of its own, as Qwen's is."""
    made = tokenizers.Tokenizer.from_str(json.dumps(tiny.byte_level()))
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return made.to_str()


def llm(template: str = HERMES) -> FakeLLM:
    made = FakeLLM()
    made.tokenizer = Tokenizer.from_parts(
        tokenizer_json=json.loads(vocabulary()), chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    return made


def task(grammar: Grammar | None = None, **fields: Any) -> ChatTask:
    messages = ({"role": "user", "content": "hi"},)
    made = ChatTask(messages, SamplingParams(grammar=grammar), tools=tuple(TOOLS))
    return dataclasses.replace(made, **fields)


def grammar_of(model: FakeLLM, wanted: ChatTask) -> Grammar:
    found = prepare(model, wanted).params.grammar  # pyright: ignore[reportArgumentType]
    assert found is not None
    return found


def allows(grammar: Grammar, text: str) -> bool:
    """Whether `text` is a whole reply of this grammar."""
    tokenizer = llguidance.LLTokenizer(vocabulary())
    matcher = llguidance.LLMatcher(tokenizer, llguidance.grammar_from(cast("Any", grammar.kind), grammar.text))
    assert not matcher.get_error(), matcher.get_error()
    tokens = llm().tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_with_a_schema_and_tools_the_model_answers_in_json_or_calls() -> None:
    grammar = grammar_of(llm(), task(JSON))
    assert allows(grammar, '{"answer": 5}')
    assert allows(grammar, CALL)
    for bad in ('{"answer": "x"}', "hello", "", CALL.replace("weather", "wizard"), CALL + '{"answer": 5}'):
        assert not allows(grammar, bad), bad


def test_only_one_call_fits_without_parallel_calls() -> None:
    assert allows(grammar_of(llm(), task(JSON)), f"{CALL}\n{CALL}")
    assert not allows(grammar_of(llm(), task(JSON, parallel_tool_calls=False)), f"{CALL}\n{CALL}")


def test_reasoning_that_the_prompt_opened_comes_before_either() -> None:
    grammar = grammar_of(llm(THINKING), task(JSON))
    for body in ('{"answer": 5}', CALL):
        assert allows(grammar, THOUGHT + body)
        assert not allows(grammar, body)
    forced = grammar_of(llm(THINKING), task(tool_choice="required"))
    assert allows(forced, THOUGHT + CALL)
    assert not allows(forced, THOUGHT + '{"answer": 5}')
    alone = grammar_of(llm(THINKING), task(JSON, tools=()))
    assert allows(alone, THOUGHT + '{"answer": 5}')
    assert not allows(alone, THOUGHT + CALL)


def test_a_form_without_tools_stays_what_it_is() -> None:
    plain = FakeLLM()
    assert grammar_of(plain, task(JSON, tools=())) == JSON
    assert grammar_of(plain, task(JSON, tool_choice="none")) == JSON
    assert prepare(plain, task()).params.grammar is None  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", ["regex", "lark", "choice"])
def test_a_form_that_is_no_json_needs_a_choice_between_it_and_tools(kind: Any) -> None:
    with pytest.raises(InvalidRequestError) as error:
        prepare(llm(), task(Grammar(kind, '["a"]')))  # pyright: ignore[reportArgumentType]
    assert error.value.param == "tool_choice"


def test_a_schema_cannot_break_out_of_the_grammar() -> None:
    tricky = {"const": "a\n\nstart: /x/\n"}
    grammar = grammar_of(llm(), task(Grammar("json_schema", json.dumps(tricky, indent=1))))
    assert allows(grammar, json.dumps(tricky["const"]))
    assert not allows(grammar, "x")


@pytest.mark.parametrize(("template", "name"), [(HERMES, "hermes"), (tiny.CHATML, "plain")])
def test_a_real_parser_reads_what_the_forced_grammar_allows(template: str, name: str) -> None:
    prepared = prepare(llm(template), task(tool_choice="function:weather"))  # pyright: ignore[reportArgumentType]
    call = CALL if name == "hermes" else '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert prepared.params.grammar is not None
    assert allows(prepared.params.grammar, call)
    parser = prepared.parser()
    parts = [*parser.feed(call), *parser.end(complete=True)]
    assert isinstance(parts[0], ToolCallStart)
    assert isinstance(parts[-1], ToolCallEnd)
    assert not any(isinstance(p, TextPart) for p in parts)


def test_max_tokens_can_be_cut_to_the_context() -> None:
    asked = dataclasses.replace(task(), params=SamplingParams(max_tokens=10**6), fit_max_tokens=True)
    prepared = prepare(llm(), asked)  # pyright: ignore[reportArgumentType]
    assert prepared.params.max_tokens == 4096 - len(prepared.ids)


def test_tools_that_are_too_many_for_one_grammar_are_refused_by_their_own_name() -> None:
    large = {"type": "object", "description": "x" * 40_000}
    tools = tuple({"type": "function", "function": {"name": name, "parameters": large}} for name in "ab")
    with pytest.raises(InvalidRequestError) as error:
        prepare(llm(), task(tools=tools, tool_choice="required"))  # pyright: ignore[reportArgumentType]
    assert error.value.param == "tools"


def test_a_lark_grammar_cannot_begin_in_open_reasoning_and_can_without() -> None:
    wanted, alone = Grammar("lark", "start: /a+/"), {"tools": ()}
    opened = "{{ messages[0].content }}<think>\n"
    with pytest.raises(InvalidRequestError, match="inside its reasoning") as error:
        prepare(llm(opened), task(wanted, **alone))  # pyright: ignore[reportArgumentType]
    assert error.value.param == "grammar"
    assert prepare(llm("{{ messages[0].content }}"), task(wanted, **alone)).params.grammar == wanted  # pyright: ignore[reportArgumentType]
