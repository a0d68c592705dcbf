"""/v1/responses, spoken to by the openai client where its reading matters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from mlxinfer.errors import EngineError
from tests.unit.server.conftest import BASE
from tests.unit.server.test_chat_tools import CITY
from tests.unit.server.test_completions import post

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from tests.unit.server.fake import FakeLLM
    from tests.unit.server.fake_format import FakeFormat

URL = "/v1/responses"
TOOLS: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}]
THINK_AND_CALL = ["r:h", "r:m", "Let ", "me.", "c:weather", 'a:{"city"', 'a:: "Rome"}', "e:"]


@pytest.fixture
def api(client: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", max_retries=0, http_client=client)


def streamed(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    reply = client.post(URL, json={"stream": True, **body})
    assert reply.status_code == 200, reply.text
    blocks = reply.text.strip().split("\n\n")
    events = [json.loads(block.split("data: ", 1)[1]) for block in blocks]
    assert [block.split("\n")[0] for block in blocks] == [f"event: {e['type']}" for e in events]
    return events


def test_a_text_comes_back_as_a_message_item(api: openai.OpenAI, llm: FakeLLM) -> None:
    llm.says, llm.cached = ["Hel", "lo"], 3
    made = api.responses.create(model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert made.output_text == "Hello"
    assert made.status == "completed"
    assert made.metadata == {"a": "b"}
    assert made.usage is not None
    assert (made.usage.output_tokens, made.usage.input_tokens_details.cached_tokens) == (2, 3)
    assert made.usage.total_tokens == made.usage.input_tokens + 2
    assert list(llm.rendered[-1]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_a_streams_events_come_in_order_and_end_with_the_whole(
    client: TestClient, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = THINK_AND_CALL
    events = streamed(client, input="hi", tools=TOOLS)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert [i["type"] for i in done] == ["reasoning", "message", "function_call"]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert done[1]["content"][0]["text"] == "Let me."
    assert done[2]["arguments"] == '{"city": "Rome"}'
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2]
    assert {i["status"] for i in done} == {"completed"}
    whole = post(client, URL, input="hi", tools=TOOLS)
    assert [(i["type"], i.get("arguments"), i.get("content")) for i in whole["output"]] == [
        (i["type"], i.get("arguments"), i.get("content")) for i in done
    ]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


def test_the_clients_own_stream_helper_reads_it(api: openai.OpenAI, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = THINK_AND_CALL
    with api.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    call = final.output[2]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.parsed_arguments) == (
        "weather",
        {"city": "Rome"},
        {"city": "Rome"},
    )
    assert final.output_text == "Let me."


def test_a_tool_round_trip_goes_on_from_the_stored_response(api: openai.OpenAI, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = THINK_AND_CALL
    first = api.responses.create(model="tiny", input="weather in Rome?", tools=TOOLS, instructions="Old.")
    call = first.output[2]
    assert call.type == "function_call"
    llm.says = ["sunny"]
    second = api.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
        tools=TOOLS,
    )
    assert second.output_text == "sunny"
    assert second.previous_response_id == first.id
    user, assistant, result = llm.rendered[-1]
    assert user == {"role": "user", "content": "weather in Rome?"}
    assert assistant["content"] == "Let me."
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert result == {"role": "tool", "tool_call_id": call.call_id, "content": "sun"}


def test_items_sent_back_make_the_same_conversation_as_a_stored_one(
    api: openai.OpenAI, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = THINK_AND_CALL
    first = api.responses.create(model="tiny", input="hi", tools=TOOLS, store=False)
    call = first.output[2]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    # As the client's documentation has it: the output's items as they came, null fields and all.
    items: list[Any] = [{"role": "user", "content": "hi"}, *(i.model_dump() for i in first.output), output]
    llm.says = ["sunny"]
    api.responses.create(model="tiny", input=items, tools=TOOLS)
    user, assistant, result = llm.rendered[-1]
    assert user["content"] == "hi"
    assert (assistant["content"], assistant["reasoning_content"]) == ("Let me.", "hm")
    assert assistant["tool_calls"][0]["id"] == call.call_id
    assert result["content"] == "sun"


def test_a_stored_response_can_be_read_and_deleted_and_an_unstored_one_not(api: openai.OpenAI, llm: FakeLLM) -> None:
    made = api.responses.create(model="tiny", input="hi")
    assert api.responses.retrieve(made.id).output_text == made.output_text
    api.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.delete(made.id)
    unstored = api.responses.create(model="tiny", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(unstored.id)
    with pytest.raises(openai.BadRequestError) as error:
        api.responses.create(model="tiny", input="hi", previous_response_id=made.id)
    assert error.value.param == "previous_response_id"


def test_a_cut_is_incomplete_and_its_half_call_is_not_in_the_output(
    client: TestClient, llm: FakeLLM, form: FakeFormat
) -> None:
    llm.says = THINK_AND_CALL
    events = streamed(client, input="hi", tools=TOOLS, max_output_tokens=6)
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [i["type"] for i in last["response"]["output"]] == ["reasoning", "message"]
    assert events[-2]["item"]["status"] == "incomplete"
    assert "response.function_call_arguments.done" not in {e["type"] for e in events}


def test_an_error_in_a_stream_is_a_failed_response(client: TestClient, llm: FakeLLM) -> None:
    llm.fail_after, llm.failure = 2, EngineError("the step failed")
    last = streamed(client, input="hi")[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "engine_error", "message": "the step failed"}
    assert client.get(f"{URL}/{last['response']['id']}").status_code == 404


@pytest.mark.parametrize("stream", [True, False])
def test_a_stored_responses_id_is_in_a_header_for_proxies(client: TestClient, stream: bool) -> None:
    reply = client.post(URL, json={"input": "hi", "stream": stream})
    kept = reply.headers["x-mlxinfer-response-id"]
    assert client.get(f"{URL}/{kept}").json()["id"] == kept
    reply = client.post(URL, json={"input": "hi", "stream": stream, "store": False})
    assert "x-mlxinfer-response-id" not in reply.headers


def test_a_schema_a_choice_and_an_effort_reach_the_engine(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": CITY, "strict": True}, "verbosity": "low"}
    made = post(client, URL, input="hi", text=text, reasoning={"effort": "low", "summary": "auto"})
    grammar = llm.made[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.text)) == ("json_schema", CITY)
    assert llm.kwargs["reasoning_effort"] == "low"
    assert made["text"] == text
    post(client, URL, input="hi", tools=TOOLS, tool_choice={"type": "function", "name": "weather"})
    grammar = llm.made[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == [["weather"], False]
    assert llm.kwargs["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    ]


def test_log_probabilities_come_when_they_are_included(client: TestClient, llm: FakeLLM) -> None:
    llm.says = ["a", "b"]
    made = post(client, URL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    found = made["output"][0]["content"][0]["logprobs"]
    assert [t["token"] for t in found] == ["a", "b"]
    assert [len(t["top_logprobs"]) for t in found] == [2, 2]
    events = streamed(client, input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    deltas = [t for e in events if e["type"] == "response.output_text.delta" for t in e["logprobs"]]
    assert deltas == found


def test_truncation_drops_the_oldest_and_keeps_the_instructions(client: TestClient, llm: FakeLLM) -> None:
    long = [{"role": "user", "content": "xq" * 900}, {"role": "assistant", "content": "ok"}]
    items = [*long, *long, *long, {"role": "user", "content": "the end"}]
    answer = client.post(URL, json={"input": items, "instructions": "Be brief."})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    post(client, URL, input=items, instructions="Be brief.", truncation="auto")
    kept = llm.rendered[-1]
    assert kept[0] == {"role": "system", "content": "Be brief."}
    assert kept[-1]["content"] == "the end"
    assert sum(m["content"].startswith("xq") for m in kept) == 2
    # What can't be made to fit is still refused.
    too_long = [{"role": "user", "content": "xq" * 9000}]
    assert client.post(URL, json={"input": too_long, "truncation": "auto"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "wizard"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": 5}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "include": ["wizard"]}, "include[0]"),
        ({"input": "x", "metadata": {"a": 1}}, "metadata.a"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "text": {"format": {"type": "wizard"}}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.json_schema.schema"),
        ({"input": "x", "previous_response_id": "resp_nowhere"}, "previous_response_id"),
        ({"input": "x", "truncation": "maybe"}, "truncation"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(client: TestClient, llm: FakeLLM, body: dict[str, Any], param: str) -> None:
    answer = client.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not llm.made


def test_truncation_drops_a_result_with_its_call(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    items = [
        {"role": "user", "content": "xq" * 2500},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "yq" * 900},
        {"role": "user", "content": "zq" * 900},
    ]
    post(client, URL, input=items, truncation="auto")
    assert [m["role"] for m in llm.rendered[-1]] == ["user"]


def test_reasoning_after_an_answer_begins_another_turn(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "one"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "two"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
    ]
    post(client, URL, input=items)
    _, first, second, *results = llm.rendered[-1]
    assert (first["content"], first["reasoning_content"]) == ("A", "one")
    assert (second["content"], second["reasoning_content"]) == (None, "two")
    assert [c["function"]["name"] for c in second["tool_calls"]] == ["f", "g"]
    assert [r["role"] for r in results] == ["tool", "tool"]
