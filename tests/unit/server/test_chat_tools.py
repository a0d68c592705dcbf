"""Tools and reasoning over /v1/chat/completions: what reaches the model, and what a client sees of its reply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.test_completions import CHAT, HELLO, events, post

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from tests.unit.server.fake import FakeLLM
    from tests.unit.server.fake_format import FakeFormat

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


TOOLS = [tool("weather"), tool("time", description="of day", strict=True)]
TWO_CALLS = ["r:hm", "Let me ", "see.", "c:weather", 'a:{"city"', 'a:: "Rome"}', "e:", "c:time", "a:{}", "e:"]


def deltas(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    reply = client.post(CHAT, json={"messages": HELLO, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    return [chunk["choices"][0] for chunk in events(reply.text)[:-1]]


def test_calls_text_and_reasoning_come_apart_in_a_whole_answer(
    client: TestClient, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = TWO_CALLS
    answer = post(client, CHAT, messages=HELLO, tools=TOOLS)
    choice = answer["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "hm")
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in message["tool_calls"])
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_stream_of_calls_adds_up_to_the_whole_answer(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = TWO_CALLS
    found = deltas(client, tools=TOOLS)
    calls: dict[int, dict[str, str]] = {}
    for choice in found:
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                assert call["type"] == "function"
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert calls == {
        0: {"name": "weather", "arguments": '{"city": "Rome"}'},
        1: {"name": "time", "arguments": "{}"},
    }
    assert "".join(c["delta"].get("content", "") for c in found) == "Let me see."
    assert "".join(c["delta"].get("reasoning_content", "") for c in found) == "hm"
    assert [c["finish_reason"] for c in found if c["finish_reason"]] == ["tool_calls"]


def test_tools_reach_the_template_and_the_parser(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    post(client, CHAT, messages=HELLO, tools=TOOLS)
    assert llm.kwargs["tools"] == TOOLS
    assert form.made[-1]["parse_tools"]
    assert list(form.made[-1]["tools"]) == TOOLS
    assert form.made[-1]["prompt_tail"].endswith("<|im_start|>assistant\n")
    # Of the markers, the one that is a special token; a plain character shows anyway.
    assert llm.made[-1].options["keep"] == frozenset(llm.tokenizer.encode("<|im_start|>", add_special_tokens=False))
    assert llm.made[-1].params.grammar is None


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}])
def test_without_tools_nothing_is_read_as_a_call_and_reasoning_is_split_off(
    client: TestClient, llm: FakeLLM, form: FakeFormat, fields: dict[str, Any]
) -> None:
    llm.says = ["r:hm", "c:weather", "e:"]
    choice = post(client, CHAT, messages=HELLO, **fields)["choices"][0]
    assert choice["message"]["content"] == "c:weathere:"
    assert choice["message"]["reasoning_content"] == "hm"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    assert "tools" not in llm.kwargs


@pytest.mark.parametrize(
    ("choice", "parallel", "forced"),
    [
        ("required", None, [["weather", "time"], True]),
        ("required", False, [["weather", "time"], False]),
        ({"type": "function", "function": {"name": "time"}}, None, [["time"], False]),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            True,
            [["weather"], True],
        ),
    ],
)
def test_a_forced_call_is_a_grammar(
    client: TestClient, llm: FakeLLM, form: FakeFormat, choice: Any, parallel: bool | None, forced: Any
) -> None:
    post(client, CHAT, messages=HELLO, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
    grammar = llm.made[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("lark", forced)


def test_a_call_that_is_cut_off_is_no_call(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = TWO_CALLS
    choice = post(client, CHAT, messages=HELLO, tools=TOOLS, max_tokens=5)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "Let me see."
    assert form.parsers[-1].completed is False
    assert deltas(client, tools=TOOLS, max_tokens=5)[-1]["finish_reason"] == "length"
    # One call was whole before the cut: it is shown, and the reason is still the cut.
    choice = post(client, CHAT, messages=HELLO, tools=TOOLS, max_tokens=8)["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "length"


def test_without_parallel_calls_the_first_call_ends_the_reply(
    client: TestClient, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = [*TWO_CALLS, *(["x"] * 500)]
    llm.delay_s = 0.001
    choice = post(client, CHAT, messages=HELLO, tools=TOOLS, parallel_tool_calls=False)["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert llm.made[-1].cancelled.is_set()
    found = deltas(client, tools=TOOLS, parallel_tool_calls=False)
    assert found[-1]["finish_reason"] == "tool_calls"
    assert {c["index"] for f in found for c in f["delta"].get("tool_calls", ())} == {0}


def test_a_template_without_tools_is_told_of_them_in_words(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    form.has_tools = False
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
    ]
    llm.says = ["c:weather", "a:{}", "e:"]
    choice = post(client, CHAT, messages=messages, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    system, _, assistant, result = llm.rendered[-1]
    assert system["content"].startswith("Be brief.\n\n")
    assert all(name in system["content"] for name in ("weather", "time", "of day"))
    assert assistant == {
        "role": "assistant",
        "content": 'Let me see.\n{"name": "weather", "arguments": {"city": "Rome"}}',
    }
    assert result == {"role": "user", "content": "sunny\nnoon"}
    assert "tools" not in llm.kwargs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("a", parameters={"x": "y" * 70_000})]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", wizardry=1)]}, "tools[0].function.wizardry"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": TOOLS, "guided_regex": "x"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
@pytest.mark.usefixtures("form")
def test_a_bad_tool_field_is_a_400_that_names_it(
    client: TestClient, llm: FakeLLM, fields: dict[str, Any], param: str
) -> None:
    answer = client.post(CHAT, json={"messages": HELLO, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not llm.made


def test_two_choices_of_calls_do_not_mix(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = TWO_CALLS
    choices = post(client, CHAT, messages=HELLO, tools=TOOLS, n=2)["choices"]
    ids = [c["id"] for choice in choices for c in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert choices[0]["message"]["content"] == choices[1]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_not_looked_for_in_reasoning_or_calls(
    client: TestClient, llm: FakeLLM, form: FakeFormat, stream: bool
) -> None:
    llm.says = ["r:I STOP", "Hello ", "ST", "c:weather", 'a:{"city": "STOP"}', "e:", " wor", "STO", "P more", "c:time"]
    body = {"messages": HELLO, "tools": TOOLS, "stop": "STOP"}
    if stream:
        found = deltas(client, **{k: v for k, v in body.items() if k != "messages"})
        text = "".join(c["delta"].get("content", "") for c in found)
        thought = "".join(c["delta"].get("reasoning_content", "") for c in found)
        names = [t["function"]["name"] for c in found for t in c["delta"].get("tool_calls", ()) if "id" in t]
    else:
        message = post(client, CHAT, **body)["choices"][0]["message"]
        text, thought = message["content"], message["reasoning_content"]
        names = [t["function"]["name"] for t in message["tool_calls"]]
    assert (text, thought, names) == ("Hello ST wor", "I STOP", ["weather"])
    assert llm.made[-1].params.stop == ()


def test_a_beginning_of_a_stop_string_is_not_lost_at_the_end(
    client: TestClient, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = ["Hello ", "STO"]
    choice = post(client, CHAT, messages=HELLO, tools=TOOLS, stop=["STOP"])["choices"][0]
    assert choice["message"]["content"] == "Hello STO"
    assert choice["finish_reason"] == "stop"


def test_what_openais_helpers_add_to_an_answer_may_come_back_with_it(client: TestClient, llm: FakeLLM) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}}
    history = [*HELLO, {"role": "assistant", "content": "x", "parsed": {"b": 2}, "tool_calls": [call]}]
    post(client, CHAT, messages=[*history, {"role": "tool", "tool_call_id": "c", "content": "y"}])
    assert "parsed" not in json.dumps(llm.rendered[-1])
