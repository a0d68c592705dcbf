"""Answers: shapes, defaults, choices, streams, and what happens to every field that is accepted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import EngineError
from mlxinfer.server.app import create_app
from mlxinfer.server.openai.chat import ChatRequest
from mlxinfer.server.openai.text import CompletionRequest
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def post(client: TestClient, url: str, **body: Any) -> dict[str, Any]:
    answer = client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    """Payloads of a stream; [DONE] as that string."""
    payloads = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [p if p == "[DONE]" else json.loads(p) for p in payloads]


def texts(chunks: Sequence[Any], n: int = 1) -> list[str]:
    out = [""] * n
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else []:
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            out[choice["index"]] += piece
    return out


def test_a_chat_answer_has_openais_shape(client: TestClient) -> None:
    answer = post(client, CHAT, model="tiny", messages=HELLO)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 6
    assert choice["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6


def test_a_text_answer_has_openais_shape(client: TestClient) -> None:
    answer = post(client, TEXT, prompt="hello", max_tokens=3)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert len(answer["choices"][0]["text"]) == 3
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_joins_to_the_whole_answer(client: TestClient, url: str, n: int) -> None:
    body: dict[str, Any] = {"messages": HELLO} if url == CHAT else {"prompt": "hello"}
    body |= {"n": n, "seed": 7}
    whole = post(client, url, **body)
    reply = client.post(url, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["content-type"].startswith("text/event-stream")
    chunks = events(reply.text)
    assert chunks[-1] == "[DONE]"
    wanted = [c["message"]["content"] if url == CHAT else c["text"] for c in whole["choices"]]
    assert texts(chunks, n) == wanted
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in chunks[:-2])
    reasons = [(c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks[:-2]]
    assert sorted(r for r in reasons if r[1]) == [(i, "stop") for i in range(n)]
    assert len({c["id"] for c in chunks[:-1]}) == 1
    if url == CHAT:
        assert [c["choices"][0]["delta"] for c in chunks[:n]] == [{"role": "assistant", "content": ""}] * n


def test_a_stream_without_usage_asked_for_has_none(client: TestClient) -> None:
    for options in (None, {}, {"include_usage": False}):
        chunks = events(client.post(CHAT, json={"messages": HELLO, "stream": True, "stream_options": options}).text)
        assert all("usage" not in c for c in chunks[:-1])
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_an_error_in_a_stream_is_its_last_event(client: TestClient, llm: FakeLLM) -> None:
    llm.fail_after, llm.failure = 2, EngineError("the step failed")
    chunks = events(client.post(CHAT, json={"messages": HELLO, "stream": True}).text)
    assert len(texts(chunks[:-1])[0]) == 2
    assert chunks[-1]["error"] == {
        "message": "the step failed",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    llm.fail_after = None
    assert post(client, CHAT, messages=HELLO)["choices"][0]["finish_reason"] == "stop"


def test_a_silent_stream_sends_comments_that_change_nothing(llm: FakeLLM) -> None:
    app = create_app({"tiny": llm}, ServerOptions(keepalive_s=0.05))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        wanted = post(client, CHAT, messages=HELLO)["choices"][0]["message"]["content"]
        llm.delay_s = 0.15
        reply = client.post(CHAT, json={"messages": HELLO, "stream": True}).text
        assert reply.count(": keep-alive\n\n") >= 6
        assert texts(events(reply)) == [wanted]
        assert post(client, CHAT, messages=HELLO)["choices"][0]["message"]["content"] == wanted


def test_a_server_that_drains_takes_nothing_new_and_says_so(client: TestClient, llm: FakeLLM) -> None:
    app: Any = client.app
    app.state.server.inflight.draining = True
    answer = client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert answer.headers["retry-after"]
    assert client.get("/health").status_code == 503
    assert not llm.made


def test_two_choices_differ_by_seed_and_the_prompt_counts_once(client: TestClient) -> None:
    one = post(client, CHAT, messages=HELLO, seed=3)
    next_one = post(client, CHAT, messages=HELLO, seed=4)
    two = post(client, CHAT, messages=HELLO, seed=3, n=2)
    contents = [c["message"]["content"] for c in two["choices"]]
    assert contents == [a["choices"][0]["message"]["content"] for a in (one, next_one)]
    assert two["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert two["usage"]["completion_tokens"] == 12
    assert post(client, CHAT, messages=HELLO, seed=2**64 - 1, n=2)["choices"][1]["index"] == 1


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), (["a"], 1)]
)
def test_each_prompt_gets_its_choices_in_order(client: TestClient, prompt: Any, count: int) -> None:
    answer = post(client, TEXT, prompt=prompt, seed=1)
    assert [c["index"] for c in answer["choices"]] == list(range(count))
    doubled = post(client, TEXT, prompt=prompt, n=2, seed=1)
    assert [c["text"] for c in doubled["choices"][::2]] == [c["text"] for c in answer["choices"]]
    assert doubled["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "field",
    [
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "n", "stream", "stream_options",
        "chat_template_kwargs", "reasoning_effort", "ignore_eos", *ChatRequest.off,
    ],
)  # fmt: skip
def test_null_means_the_default(client: TestClient, llm: FakeLLM, field: str) -> None:
    plain = post(client, CHAT, messages=HELLO)
    assert post(client, CHAT, messages=HELLO, **{field: None})["choices"] == plain["choices"]
    assert llm.made[-1].params == llm.made[0].params


def test_values_that_turn_a_feature_off_pass(client: TestClient) -> None:
    for field, values in ChatRequest.off.items():
        for value in values:
            post(client, CHAT, messages=HELLO, **{field: value})


def test_harmless_fields_are_ignored_and_named(client: TestClient) -> None:
    body = {"messages": HELLO, "user": "me", "metadata": {"a": "b"}, "store": None}
    for stream in (False, True):
        answer = client.post(CHAT, json=body | {"stream": stream})
        assert answer.headers["x-mlxinfer-ignored"] == "user, metadata, store"
    assert "x-mlxinfer-ignored" not in client.post(CHAT, json={"messages": HELLO}).headers
    for field in ChatRequest.harmless:
        post(client, CHAT, messages=HELLO, **{field: "x"})
    for field in CompletionRequest.harmless:
        post(client, TEXT, prompt="hello", **{field: "x"})


def test_sampling_fields_reach_the_engine(client: TestClient, llm: FakeLLM) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 9, "max_tokens": 4, "ignore_eos": True,
    }  # fmt: skip
    post(client, CHAT, messages=HELLO, **fields, stop=["zz", "yy"], logit_bias={"5": -100, "6": 2.5})
    params = llm.made[-1].params
    for field, value in fields.items():
        assert getattr(params, field) == value
    assert params.stop == ("zz", "yy")
    assert params.logit_bias == {5: -100.0, 6: 2.5}
    post(client, CHAT, messages=HELLO, stop="x", top_k=10**12, max_tokens=-1)
    params = llm.made[-1].params
    assert (params.stop, params.top_k, params.max_tokens) == (("x",), 2**31 - 1, None)


def test_top_k_zero_keeps_all(client: TestClient, llm: FakeLLM) -> None:
    post(client, CHAT, messages=HELLO, top_k=0)
    assert llm.made[-1].params.top_k == 0


def test_text_ends_before_the_stop_string(client: TestClient) -> None:
    full = post(client, TEXT, prompt="hello")["choices"][0]["text"]
    cut = post(client, TEXT, prompt="hello", stop=full[2:4])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (full[:2], "stop")


@pytest.mark.usefixtures("form")
def test_messages_reach_the_template_as_it_reads_them(client: TestClient, llm: FakeLLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    post(client, CHAT, messages=messages)
    system, user, assistant, tool = llm.rendered[-1]
    assert system["role"] == "system"
    assert user["name"] == "ann"
    assert assistant["content"] is None
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool["tool_call_id"] == "1"


def test_template_arguments_reach_the_template(client: TestClient, llm: FakeLLM) -> None:
    post(client, CHAT, messages=HELLO, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert llm.kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_the_prompt_is_rendered_with_the_chat_template(client: TestClient, llm: FakeLLM) -> None:
    post(client, CHAT, messages=HELLO)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert llm.made[-1].prompt_tokens == len(llm.tokenizer.encode(text))


def test_several_models_are_served_by_name_and_one_must_be_named() -> None:
    a, b = FakeLLM("a"), FakeLLM("b")
    app = create_app({"a": a, "org/b": b})  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [m["id"] for m in listed["data"]] == ["a", "org/b"]
        assert client.get("/v1/models/org/b").json()["id"] == "org/b"
        assert client.get("/v1/models/c").status_code == 404
        assert post(client, CHAT, model="org/b", messages=HELLO)["model"] == "org/b"
        assert (len(a.made), len(b.made)) == (0, 1)
        missing = client.post(CHAT, json={"messages": HELLO})
        assert missing.status_code == 400
        assert missing.json()["error"]["message"].endswith("a, org/b")


def test_text_that_is_not_ascii_survives_both_ways(client: TestClient, llm: FakeLLM) -> None:
    post(client, CHAT, messages=[{"role": "user", "content": "日本語 🙂"}])
    assert llm.rendered[-1][0]["content"] == "日本語 🙂"
