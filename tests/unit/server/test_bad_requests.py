"""Every bad request is answered by an error that names the field, and the next good one gets the same tokens."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.server.openai.chat import ChatRequest
from mlxinfer.server.openai.text import CompletionRequest

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from tests.unit.server.fake import FakeLLM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SURROGATE = "\\ud800"


def good(client: TestClient) -> str:
    answer = client.post(CHAT, json={"model": "tiny", "messages": HELLO, "seed": 5})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def refused(client: TestClient, llm: FakeLLM, url: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Post `body` (text as it is, else as JSON), check the error's shape and that nothing was queued."""
    before = good(client)
    queued = len(llm.made)
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    answer = client.post(url, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(llm.made) == queued
    assert good(client) == before
    return error


BAD_SAMPLING = [
    ("stop", [1]),
    ("stop", 5),
    ("stop", [["x"]]),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("top_k", -1),
    ("top_k", 1.5),
    ("logit_bias", {"100000000": 1}),
    ("logit_bias", {"2147483647": 1}),
    ("logit_bias", {"99999999999": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {"05": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1": "2"}),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 1000}),
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", -0.1),
    ("top_p", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("presence_penalty", "x"),
    ("frequency_penalty", 1e9),
    ("seed", 2**70),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -7),
    ("max_tokens", "10"),
    ("max_tokens", True),
    ("max_tokens", 1e12),
    ("max_tokens", 10**12),
    ("n", 1000),
    ("n", 0),
    ("n", "2"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": 1}),
    ("repetition_context_size", 10**30),
    ("best_of", 3),
    ("logprobs", -1),
    ("logprobs", "x"),
    ("priority", 11),
    ("response_format", {"type": "wizard"}),
    ("response_format", {}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": "x" * 70_000}}}),
    ("guided_regex", ""),
    ("guided_choice", []),
    ("guided_choice", [1]),
    ("guided_json", "{"),
    ("guided_json", "[1]"),
    ("structured_outputs", {"jsn": {}}),
    ("wizardry", 1),
]


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_a_bad_sampling_value_is_a_400_that_names_the_field(
    client: TestClient, llm: FakeLLM, url: str, field: str, value: Any
) -> None:
    body = {"messages": HELLO} if url == CHAT else {"prompt": "hello"}
    error = refused(client, llm, url, body | {field: value})
    assert field in error["message"]
    assert (error["param"] or field).startswith(field)


@pytest.mark.parametrize(
    ("field", "literal"),
    [
        ("temperature", "NaN"),
        ("temperature", "1e400"),
        ("temperature", "-Infinity"),
        ("temperature", "1" + "0" * 400),
        ("temperature", "1" * 5000),
        ("seed", "1" * 5000),
        ("logit_bias", '{"1": NaN}'),
        ("logit_bias", '{"1": 1e999}'),
        ("max_tokens", "1" + "0" * 30),
        ("top_k", '"x"'),
        ("user", "[" * 100 + "]" * 100),
        ("user", '"' + SURROGATE + '"'),
        ("model", '"' + SURROGATE + '"'),
        (SURROGATE, "1"),
    ],
)
def test_numbers_and_text_that_json_allows_but_no_field_does_are_400(
    client: TestClient, llm: FakeLLM, field: str, literal: str
) -> None:
    refused(client, llm, CHAT, f'{{"messages": {json.dumps(HELLO)}, "{field}": {literal}}}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b"\xff\xfe{}",
        b'{"messages": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [], "messages": }',
        b"{'messages': []}",
        b"\x00",
    ],
)
def test_a_malformed_body_is_a_400(client: TestClient, llm: FakeLLM, body: bytes) -> None:
    assert refused(client, llm, CHAT, body)["code"] == "invalid_json"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        [5],
        [{}],
        [{"content": "x"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "user", "content": "x", "spell": 1}],
    ],
)
def test_bad_messages_are_a_400_that_names_them(client: TestClient, llm: FakeLLM, messages: Any) -> None:
    assert refused(client, llm, CHAT, {"messages": messages})["param"].startswith("messages")


def test_an_image_for_a_text_model_is_refused_and_nothing_is_fetched(
    client: TestClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("socket.socket.connect", lambda *args: opened.append(args))
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}]
    error = refused(client, llm, CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert "image_url" in error["message"]
    assert error["param"] == "messages[0].content"
    assert not opened


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", ""], [[]], [[1], []], 5, None, [1, "a"], ["a", [1]], [True], [1.5], {"a": 1}]
)
def test_a_bad_prompt_is_a_400_that_names_it(client: TestClient, llm: FakeLLM, prompt: Any) -> None:
    assert refused(client, llm, TEXT, {"prompt": prompt})["param"] == "prompt"


def test_token_ids_outside_the_vocabulary_are_a_400(client: TestClient, llm: FakeLLM) -> None:
    for ids in ([10**8], [-1], [2**70]):
        refused(client, llm, TEXT, {"prompt": ids})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", "wizard"),
        ("logprobs", 1),
        ("top_logprobs", 2),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("functions", [{"name": "f"}]),
        ("echo", True),
        ("suffix", "x"),
        ("options", {}),
        ("best_of", True),
    ],
)
def test_a_field_that_is_not_supported_yet_is_a_400_by_name(
    client: TestClient, llm: FakeLLM, field: str, value: Any
) -> None:
    error = refused(client, llm, CHAT, {"messages": HELLO, field: value})
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 7*7 }}"},
        {"x": "{{ 7*7 }}"},
        {"x": "{% for i in range(9) %}"},
        {"return_tensors": "pt"},
        {"tokenize": False},
        {"messages": []},
        {"bos_token": "x"},
        {"x": "a" * 1000},
        {"x": [1]},
        {"not a name": 1},
        {f"k{i}": 1 for i in range(17)},
        5,
    ],
)
def test_template_arguments_that_reach_too_far_are_a_400(client: TestClient, llm: FakeLLM, kwargs: Any) -> None:
    error = refused(client, llm, CHAT, {"messages": HELLO, "chat_template_kwargs": kwargs})
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["other", "", "../x", "/etc/passwd", "a\x00b", "x" * 10_000, "tiny/../tiny"])
def test_an_unknown_model_is_a_404_that_lists_what_is_served(client: TestClient, llm: FakeLLM, name: str) -> None:
    error = refused(client, llm, CHAT, {"model": name, "messages": HELLO}, 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert error["message"].endswith("this server has: tiny")
    assert len(error["message"]) < 300


def test_a_model_that_is_no_string_is_a_400(client: TestClient, llm: FakeLLM) -> None:
    assert refused(client, llm, CHAT, {"model": ["tiny"], "messages": HELLO})["param"] == "model"


def test_a_prompt_beyond_the_context_is_a_400_with_openais_code(client: TestClient, llm: FakeLLM) -> None:
    messages = [{"role": "user", "content": "hello " * 5000}]
    assert refused(client, llm, CHAT, {"messages": messages})["code"] == "context_length_exceeded"


def test_two_token_limits_that_differ_are_a_400_and_equal_ones_are_not(client: TestClient, llm: FakeLLM) -> None:
    refused(client, llm, CHAT, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3})
    body = {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2}
    assert client.post(CHAT, json=body).json()["usage"]["completion_tokens"] == 2


def test_the_newer_token_limit_is_named_when_it_is_wrong(client: TestClient, llm: FakeLLM) -> None:
    error = refused(client, llm, CHAT, {"messages": HELLO, "max_completion_tokens": 0})
    assert error["param"] == "max_completion_tokens"
    assert "max_completion_tokens" in error["message"]


def test_a_body_beyond_the_limit_is_a_413(client: TestClient, llm: FakeLLM) -> None:
    body = json.dumps({"messages": HELLO, "user": "x" * (11 << 20)})
    assert refused(client, llm, CHAT, body, 413)["code"] == "body_too_large"


def test_unknown_paths_and_methods_have_the_same_error_shape(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    answer = client.get(CHAT)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_a_full_queue_is_a_429_with_retry_after_and_leaves_no_half_request(client: TestClient, llm: FakeLLM) -> None:
    llm.full_from = 1
    answer = client.post(CHAT, json={"messages": HELLO, "n": 3})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "queue_full"
    assert [g.cancelled.is_set() for g in llm.made] == [True]


def test_an_unloaded_model_is_a_503_and_health_says_so(client: TestClient, llm: FakeLLM) -> None:
    model = {"status": "ok", "running": 1, "waiting": 2}
    health = client.get("/health").json()
    assert health["memory"].keys() == {"budget", "weights", "kv", "prefix_cache"}
    assert {k: health[k] for k in ("status", "models")} == {"status": "ok", "models": {"tiny": model}}
    llm.alive = False
    assert client.post(CHAT, json={"messages": HELLO}).status_code == 503
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "dead"
    assert answer.json()["models"] == {"tiny": model | {"status": "dead"}}


def test_our_own_bug_is_a_500_that_shows_nothing_of_the_inside(client: TestClient, llm: FakeLLM) -> None:
    llm.fail_after, llm.failure = 2, ZeroDivisionError("secret detail")
    answer = client.post(CHAT, json={"messages": HELLO})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


def test_harmless_and_refused_fields_do_not_overlap_with_what_is_honoured() -> None:
    for kind in (ChatRequest, CompletionRequest):
        assert not kind.harmless & set(kind.off)
        assert not (kind.harmless | set(kind.off)) & set(kind.model_fields)


@pytest.mark.parametrize("biases", ['{"5": 1, "5": 2}', '{"5": 1, "\\u0035": 2}'])
def test_a_name_that_comes_twice_is_refused(client: TestClient, llm: FakeLLM, biases: str) -> None:
    error = refused(client, llm, TEXT, '{"prompt": "a", "logit_bias": ' + biases + "}")
    assert "'5' twice" in error["message"]


@pytest.mark.parametrize(("url", "body"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})])
def test_tokens_beyond_the_models_vocabulary_are_a_400(
    client: TestClient, llm: FakeLLM, url: str, body: dict[str, Any]
) -> None:
    llm.info = dataclasses.replace(llm.info, vocab_size=3)
    answer = client.post(url, json=body)
    assert answer.status_code == 400
    assert "vocabulary" in answer.json()["error"]["message"]
