"""Anthropic's own client against a served model, and plain HTTP where the client hides what is sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic
import pytest
from anthropic.types import TextBlock, ThinkingBlock, ToolUseBlock
from starlette.testclient import TestClient

from mlxinfer.errors import EngineError, ModelsBusyError
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import CONTEXT, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.server.fake import FakeLLM
    from tests.unit.server.fake_format import FakeFormat

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "weather", "input_schema": SCHEMA}, {"name": "time", "input_schema": SCHEMA}]
BODY = {"model": "tiny", "max_tokens": 64, "messages": HELLO}


@pytest.fixture
def claude(address: tuple[str, int]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://{address[0]}:{address[1]}", api_key="none", max_retries=0, timeout=30
    ) as made:
        yield made


def test_a_message_is_answered(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    llm.cached = 3
    made = claude.messages.create(model="tiny", max_tokens=64, system="be brief", messages=HELLO)
    (block,) = made.content
    assert isinstance(block, TextBlock)
    assert len(block.text) == 6
    assert (made.type, made.role, made.model, made.stop_reason) == ("message", "assistant", "tiny", "end_turn")
    assert made.id.startswith("msg_")
    assert made._request_id
    assert made.usage.cache_read_input_tokens == 3
    assert made.usage.input_tokens == llm.made[-1].prompt_tokens - 3
    assert made.usage.output_tokens == 6
    assert [m["role"] for m in llm.rendered[-1]] == ["system", "user"]


def test_a_stream_builds_the_same_message(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    whole = claude.messages.create(model="tiny", max_tokens=64, messages=HELLO)
    with claude.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [b.to_dict() for b in whole.content] == [b.to_dict() for b in final.content]
    assert text == whole.content[0].text  # pyright: ignore[reportAttributeAccessIssue]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"


def test_a_tool_loop_goes_round(claude: anthropic.Anthropic, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = ["r:hm", "I look.", "c:weather", 'a:{"city"', 'a:: "Rome"}', "e:"]
    with claude.messages.stream(model="tiny", max_tokens=64, messages=HELLO, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "text", "input_json", "content_block_stop", "message_stop"} <= kinds
    thinking, text, use = final.content
    assert isinstance(thinking, ThinkingBlock)
    assert isinstance(text, TextBlock)
    assert isinstance(use, ToolUseBlock)
    assert (thinking.thinking, text.text, use.name, use.input) == ("hm", "I look.", "weather", {"city": "Rome"})
    assert final.stop_reason == "tool_use"
    assert [t["function"]["name"] for t in llm.kwargs["tools"]] == ["weather", "time"]

    llm.says = ["Sunny."]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    turns: list[Any] = [*HELLO, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    last = claude.messages.create(model="tiny", max_tokens=64, messages=turns, tools=TOOLS)
    assert last.content[0].text == "Sunny."  # pyright: ignore[reportAttributeAccessIssue]
    sent = llm.rendered[-1]
    assert sent[1]["reasoning_content"] == "hm"
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert sent[2] == {"role": "tool", "tool_call_id": use.id, "name": "weather", "content": "sunny"}


def test_a_tool_that_must_be_called_is_forced(claude: anthropic.Anthropic, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = ["c:time", "a:{}", "e:", "c:time", "a:{}", "e:"]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    made = claude.messages.create(model="tiny", max_tokens=64, messages=HELLO, tools=TOOLS, tool_choice=choice)
    assert [b.type for b in made.content] == ["tool_use"]
    grammar = llm.made[-1].params.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == [["weather", "time"], False]


def test_tokens_are_counted_as_the_answer_counts_them(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    counted = claude.messages.count_tokens(model="tiny", messages=HELLO, system="be brief")
    assert not llm.made
    made = claude.messages.create(model="tiny", max_tokens=64, messages=HELLO, system="be brief")
    assert counted.input_tokens == made.usage.input_tokens


def test_the_beta_namespace_is_answered_too(claude: anthropic.Anthropic) -> None:
    made = claude.beta.messages.create(
        model="tiny", max_tokens=64, messages=HELLO, betas=["interleaved-thinking-2025-05-14"]
    )
    assert made.content[0].type == "text"


def test_models_are_listed_in_anthropics_shape_for_its_clients_only(
    claude: anthropic.Anthropic, client: TestClient
) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", CONTEXT)
    assert claude.models.retrieve("tiny").display_name == "tiny"
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.models.retrieve("gone")
    assert caught.value.body["type"] == "error"  # pyright: ignore[reportOptionalSubscript, reportIndexIssue, reportCallIssue, reportArgumentType]
    assert client.get("/v1/models").json()["object"] == "list"


def test_a_limit_beyond_the_context_is_cut_to_it_and_said(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    llm.endless = True
    made = claude.messages.create(model="tiny", max_tokens=10_000, messages=HELLO, timeout=60)
    assert made.usage.input_tokens + made.usage.output_tokens == CONTEXT
    assert made.stop_reason == "model_context_window_exceeded"
    made = claude.messages.create(model="tiny", max_tokens=10, messages=HELLO)
    assert (made.usage.output_tokens, made.stop_reason) == (10, "max_tokens")


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    llm.says = ["one ", "two ", "three"]
    made = claude.messages.create(model="tiny", max_tokens=64, messages=HELLO, stop_sequences=["two"])
    assert made.content[0].text == "one "  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "error", "kind"),
    [
        ({"model": "gone"}, anthropic.NotFoundError, "not_found_error"),
        ({"model": "../../etc/passwd"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"temperature": 5}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, anthropic.BadRequestError, "invalid_request_"),
        ({"extra_body": {"nonsense": 1}}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_a_refusal_has_anthropics_shape_and_a_good_request_after_it_is_the_same(
    claude: anthropic.Anthropic, change: dict[str, Any], error: type[anthropic.APIStatusError], kind: str
) -> None:
    before = claude.messages.create(**BODY).content  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(error) as caught:
        claude.messages.create(**(BODY | change))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert kind in str(caught.value.body)
    assert caught.value.request_id == caught.value.body["request_id"]  # pyright: ignore[reportOptionalSubscript, reportIndexIssue, reportCallIssue, reportArgumentType]
    after = claude.messages.create(**BODY).content  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert before == after


def test_a_full_queue_and_a_lack_of_memory_are_told_apart(
    claude: anthropic.Anthropic, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.full_from = 0
    with pytest.raises(anthropic.RateLimitError) as full:
        claude.messages.create(**BODY)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert full.value.response.headers["retry-after"] == "3"
    llm.full_from = None

    def busy(*_: Any, **__: Any) -> None:
        raise ModelsBusyError("no memory now")

    monkeypatch.setattr(llm, "check", busy)
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.messages.create(**BODY)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert caught.value.status_code == 503
    assert "overloaded_error" in str(caught.value.body)


def test_a_failure_after_the_stream_began_is_its_last_event(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    llm.fail_after, llm.failure = 2, EngineError("the engine broke")
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine broke"),
        claude.messages.stream(**BODY) as stream,  # pyright: ignore[reportArgumentType, reportCallIssue]
    ):
        list(stream)
    llm.fail_after = None
    assert claude.messages.create(**BODY).stop_reason == "end_turn"  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_a_client_that_leaves_cancels_the_work(claude: anthropic.Anthropic, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 0.01
    with claude.messages.stream(model="tiny", max_tokens=4000, messages=HELLO) as stream:
        next(iter(stream.text_stream))
    assert wait_for(lambda: llm.made[-1].cancelled.is_set())


def test_silence_is_filled_with_pings(llm: FakeLLM) -> None:
    llm.delay_s = 0.05
    app = create_app({"tiny": llm}, ServerOptions(keepalive_s=0.01))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        text = client.post("/v1/messages", json={**BODY, "stream": True}).text
    assert text.count("event: ping\n") > 3
    assert "[DONE]" not in text
    assert text.rstrip().endswith('{"type":"message_stop"}')


def test_what_the_guard_refuses_has_anthropics_shape(llm: FakeLLM) -> None:
    app = create_app({"tiny": llm}, ServerOptions(api_key="secret"))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        answer = client.post("/v1/messages?beta=true", json=BODY)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["request_id"] == answer.headers["request-id"]
        answer = client.post("/v1/messages", content=b"{", headers={"authorization": "Bearer secret"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        answer = client.get("/v1/messages", headers={"authorization": "Bearer secret"})
        assert (answer.status_code, answer.json()["type"]) == (405, "error")


def test_ignored_fields_are_named_in_a_header(client: TestClient) -> None:
    answer = client.post("/v1/messages", json={**BODY, "metadata": {"user_id": "u"}, "service_tier": "auto"})
    assert answer.status_code == 200
    assert answer.headers["x-mlxinfer-ignored"] == "metadata, service_tier"


def test_a_call_that_turned_out_to_be_none_is_text_only(client: TestClient, llm: FakeLLM, form: FakeFormat) -> None:
    llm.says = ["c:weather", 'a:{"city"', "it was text", "c:time", "a:{}", "e:", "c:weather", "a:{"]
    made = client.post("/v1/messages", json=BODY | {"tools": TOOLS}).json()
    assert [b["type"] for b in made["content"]] == ["text", "tool_use"]
    assert (made["content"][0]["text"], made["content"][1]["name"]) == ("it was text", "time")
