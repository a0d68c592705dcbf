"""What of a request to /v1/messages reaches the chat template and the sampler, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.anthropic.schemas import MessagesRequest
from mlxinfer.server.anthropic.task import read_count, read_messages
from mlxinfer.server.ollama.schemas import GenerateRequest

HELLO_BLOCK = {"type": "text", "text": "hello"}
HELLO = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 2048, "messages": list(messages or [HELLO]), **fields}


def template(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return list(read_messages(body(*messages, **fields)).task.messages)


def refused(*messages: Any, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequestError) as caught:
        read_messages(body(*messages, **fields))
    assert caught.value.status == 400
    return caught.value.param


def test_system_text_comes_first_whether_it_is_a_string_or_blocks() -> None:
    assert template(system="be brief") == [{"role": "system", "content": "be brief"}, HELLO]
    blocks = [
        {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    made = template(system=blocks)
    assert made[0] == {"role": "system", "content": [{"type": "text", "text": t} for t in ("be", "brief")]}
    assert template(system="") == template(system=[]) == template(system=None) == [HELLO]


def test_an_accounting_line_that_differs_in_each_request_does_not_reach_the_prompt() -> None:
    blocks = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i};"} for i in range(2)]
    assert template(system=[*blocks, {"type": "text", "text": "be brief"}])[0]["content"] == "be brief"


def test_a_tool_loop_becomes_calls_results_and_text_in_their_order() -> None:
    made = template(
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                CALL,
                {**CALL, "id": "toolu_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "no city"}],
                    "is_error": True,
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    )
    calls = [
        {"id": f"toolu_{i}", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        for i in (1, 2)
    ]
    assert made[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "weather", "content": "Error: no city"},
        {"role": "user", "content": "and now?"},
    ]


def test_turns_of_one_role_that_follow_each_other_are_one_turn() -> None:
    made = template(HELLO, {"role": "user", "content": "again"})
    assert made == [{"role": "user", "content": [{"type": "text", "text": t} for t in ("hello", "again")]}]
    made = template(HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": [CALL]}, HELLO)
    assert [m["role"] for m in made] == ["user", "assistant", "user"]
    assert made[1]["content"] == "a"
    assert len(made[1]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/x.png"}}, "messages[0].content[0]"),
        ({"type": "document", "source": {"type": "text", "data": "x"}}, "messages[0].content[0]"),
        (CALL, "messages[0].content[0]"),
        ({"text": "x"}, "messages[0].content[0].type"),
        ({"type": "text"}, "messages[0].content[0].text"),
        ({"type": "text", "text": 5}, "messages[0].content[0].text"),
        ({"type": "text", "text": "x", "nonsense": 1}, "messages[0].content[0].nonsense"),
        ({"type": "tool_result", "tool_use_id": "nobody"}, "messages[0].content[0].tool_use_id"),
    ],
)
def test_a_block_that_cannot_be_read_is_refused_by_its_place(block: Any, param: str) -> None:
    assert refused({"role": "user", "content": [block]}) == param


def test_pictures_and_flags_inside_a_tools_result_are_looked_at_too() -> None:
    def result(**more: Any) -> tuple[Any, ...]:
        block = {"type": "tool_result", "tool_use_id": "toolu_1", **more}
        return HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}

    assert refused(*result(content=[{"type": "image", "source": {}}])) == "messages[2].content[0].content[0]"
    assert refused(*result(content=5)) == "messages[2].content[0].content"
    assert refused(*result(content=["x"])) == "messages[2].content[0].content"
    assert refused(*result(is_error="yes")) == "messages[2].content[0].is_error"
    assert template(*result())[-1]["content"] == ""


def test_a_reply_that_is_begun_by_the_client_is_refused() -> None:
    assert refused(HELLO, {"role": "assistant", "content": "The answer is ("}) == "messages[1]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"stop": ["x"]}, "stop"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "no spaces"}]}, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x", "input_schema": {"description": "x" * 70_000}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any", "name": "weather"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"x": "y" * 70_000}}}},
            "output_config.format",
        ),
    ],
)
def test_a_value_that_is_wrong_is_refused_by_its_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


def test_an_error_speaks_of_fields_as_the_client_does() -> None:
    with pytest.raises(InvalidRequestError, match=r"^stop_sequences has 5 strings"):
        read_messages(body(stop_sequences=list("abcde")))


def test_sampling_fields_arrive_and_null_is_the_default() -> None:
    asked = read_messages(body(stop_sequences=["x", "y"], temperature=1, top_p=0.5, top_k=10**12, stream=True))
    params = asked.task.params
    assert (params.max_tokens, params.stop, params.temperature, params.top_p) == (2048, ("x", "y"), 1, 0.5)
    assert params.top_k == 2**31 - 1, "all of any vocabulary, and what the arrays can hold"
    assert asked.stream
    nulls = dict.fromkeys(("stop_sequences", "temperature", "top_p", "top_k", "stream", "tools", "tool_choice"))
    asked = read_messages(body(**nulls))
    assert asked.task.params == read_messages(body()).task.params
    assert not asked.stream


def test_tools_and_their_choice_arrive_as_the_server_has_them() -> None:
    for sent, ours in (("auto", "auto"), ("any", "required"), ("none", "none")):
        task = read_messages(body(tools=[WEATHER], tool_choice={"type": sent})).task
        assert task.tool_choice == ours
        assert task.parallel_tool_calls
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    task = read_messages(body(tools=[{**WEATHER, "type": "custom", "strict": True}], tool_choice=choice)).task
    assert (task.tool_choice, task.parallel_tool_calls) == ("function:weather", False)
    function = {"name": "weather", "description": "of a city", "parameters": WEATHER["input_schema"], "strict": True}
    assert task.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("thinking", "kwargs"),
    [
        (None, {}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive"}, {"enable_thinking": True}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking_budget": 1024}),
    ],
)
def test_thinking_reaches_the_template(thinking: Any, kwargs: dict[str, Any]) -> None:
    asked = read_messages(body(thinking=thinking))
    assert asked.task.template_kwargs == kwargs
    assert ("thinking.budget_tokens" in asked.ignored) == ("thinking_budget" in kwargs)


@pytest.mark.parametrize(("display", "shown"), [(None, True), ("summarized", True), ("omitted", False)])
def test_thinking_is_shown_unless_it_is_to_be_left_out(display: str | None, shown: bool) -> None:
    assert read_messages(body(thinking={"type": "adaptive", "display": display})).show_thinking is shown


def test_effort_and_the_form_of_the_answer_are_honoured_in_both_places() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"effort": "low", "format": form}}, {"output_format": form}):
        task = read_messages(body(**fields)).task
        assert task.params.grammar is not None
        assert (task.params.grammar.kind, json.loads(task.params.grammar.text)) == ("json_schema", {"type": "object"})
    assert read_messages(body(output_config={"effort": "low"})).task.template_kwargs == {"reasoning_effort": "low"}


def test_fields_that_change_nothing_about_the_text_are_named() -> None:
    sent = body(metadata={"user_id": "u"}, service_tier="auto", context_management={"edits": []}, mcp_servers=[])
    assert read_messages(sent).ignored == ("metadata", "service_tier", "context_management")


def test_a_request_as_a_coding_agent_sends_it_is_read() -> None:
    cache = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    tool = {"name": "mcp__files__read", "description": "d", "input_schema": schema, "defer_loading": True, **cache}
    sent = body(
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>", **cache}, HELLO_BLOCK]},
        {"role": "system", "content": "now in plan mode"},
        HELLO,
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1"}, {**HELLO_BLOCK, **cache}],
        tools=[tool, {**WEATHER, "type": "custom", "eager_input_streaming": True}],
        metadata={"user_id": "u"},
        thinking={"type": "adaptive", "display": "summarized"},
        output_config={"effort": "medium"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
    )
    asked = read_messages(sent)
    assert [m["role"] for m in asked.task.messages] == ["system", "user", "system", "user"]
    assert asked.ignored == ("metadata", "context_management")
    assert asked.task.template_kwargs == {"enable_thinking": True, "reasoning_effort": "medium"}


def test_every_field_that_is_ignored_or_refused_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "apis.md").read_text()
    for kind in (MessagesRequest, GenerateRequest):
        for name in (*kind.harmless, *kind.off, *kind.model_fields):
            if name not in ("model", "width", "height", "steps"):
                assert f"`{name}`" in text, name


def test_counting_needs_no_limit_and_takes_no_sampling() -> None:
    sent = {"model": "tiny", "messages": [HELLO], "system": "x", "tools": [WEATHER]}
    assert len(read_count(sent).task.messages) == 2
    with pytest.raises(InvalidRequestError) as caught:
        read_count({**sent, "max_tokens": 5})
    assert caught.value.param == "max_tokens"
