"""Ollama's own client against a served model, and plain HTTP where the client hides what is sent."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ollama
import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import EngineError
from mlxinfer.pool import ModelPool
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import CONTEXT, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.server.fake import FakeLLM
    from tests.unit.server.fake_format import FakeFormat

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


@pytest.fixture
def client_(address: tuple[str, int]) -> Iterator[ollama.Client]:
    with ollama.Client(host=f"http://{address[0]}:{address[1]}", timeout=30) as made:
        yield made


def test_a_chat_is_answered_whole_and_streamed(client_: ollama.Client) -> None:
    whole = client_.chat("tiny", HELLO)
    assert len(whole.message.content or "") == 6
    assert (whole.model, whole.done, whole.done_reason, whole.eval_count) == ("tiny", True, "stop", 6)
    assert whole.total_duration
    assert datetime.datetime.fromisoformat(whole.created_at or "").tzinfo is not None
    parts = list(client_.chat("tiny", HELLO, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert [p.done for p in parts] == [False] * (len(parts) - 1) + [True]


def test_a_prompt_is_answered_with_and_without_the_template(client_: ollama.Client, llm: FakeLLM) -> None:
    whole = client_.generate("tiny", "hello", system="be brief")
    assert len(whole.response or "") == 6
    assert [m["role"] for m in llm.rendered[-1]] == ["system", "user"]
    rendered = len(llm.rendered)
    raw = client_.generate("tiny", "hello", raw=True)
    assert raw.prompt_eval_count == len(llm.tokenizer.encode("hello"))
    assert len(llm.rendered) == rendered, "a raw prompt sees no template"
    streamed = list(client_.generate("tiny", "hello", raw=True, stream=True, options={"num_predict": 3}))
    assert streamed[-1].done_reason == "length"
    assert "".join(p.response or "" for p in streamed) == (raw.response or "")[:3]


def test_the_async_client_is_answered_too(address: tuple[str, int]) -> None:
    async def ask() -> tuple[str, str]:
        async with ollama.AsyncClient(host=f"http://{address[0]}:{address[1]}", timeout=30) as client:
            whole = await client.chat("tiny", HELLO)
            parts = [p async for p in await client.chat("tiny", HELLO, stream=True)]
            return whole.message.content or "", "".join(p.message.content or "" for p in parts)

    whole, streamed = asyncio.run(ask())
    assert whole == streamed


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_goes_round(client_: ollama.Client, llm: FakeLLM, form: FakeFormat, stream: bool) -> None:
    llm.says = ["r:hm", "I look.", "c:weather", 'a:{"city"', 'a:: "Rome"}', "e:"]
    made: Any = client_.chat("tiny", HELLO, tools=[weather], think=True, stream=stream)
    messages = [part.message for part in made] if stream else [made.message]
    calls = [call for message in messages for call in message.tool_calls or ()]
    assert "".join(m.thinking or "" for m in messages) == "hm"
    assert [(c.function.name, c.function.arguments) for c in calls] == [("weather", {"city": "Rome"})]
    assert llm.kwargs["enable_thinking"] is True
    assert llm.kwargs["tools"][0]["function"]["parameters"]["properties"]["city"]["type"] == "string"

    llm.says = ["Sunny."]
    call = calls[0].function
    turns = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [c.model_dump() for c in calls]},
        {"role": "tool", "tool_name": call.name, "content": weather(**call.arguments)},
    ]
    assert client_.chat("tiny", turns, tools=[weather]).message.content == "Sunny."
    assert llm.rendered[-1][2]["content"] == "sunny in Rome"
    assert llm.rendered[-1][2]["tool_call_id"] == llm.rendered[-1][1]["tool_calls"][0]["id"]


def test_a_schema_and_options_reach_the_model(client_: ollama.Client, llm: FakeLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client_.chat("tiny", HELLO, format=schema, options={"temperature": 0, "num_predict": 4, "seed": 3})
    params = llm.made[-1].params
    assert params.grammar is not None
    assert json.loads(params.grammar.text) == schema
    assert (params.temperature, params.max_tokens, params.seed) == (0, 4, 3)


@pytest.mark.parametrize("raw", [False, True])
def test_a_form_is_compiled_before_the_request_is_queued_and_a_wrong_one_is_named(
    client: TestClient, llm: FakeLLM, raw: bool
) -> None:
    body: dict[str, Any] = {"model": "tiny", "prompt": "x", "raw": raw, "stream": False}
    assert client.post("/api/generate", json=body | {"format": {"type": "object"}}).status_code == 200
    assert [grammar.kind for grammar in llm.compiled] == ["json_schema"]
    answer = client.post("/api/generate", json=body | {"format": {"const": "no such thing"}})
    assert (answer.status_code, answer.json()) == (400, {"error": "format: the grammar cannot be used"})


def test_log_probabilities_come_with_their_text(client_: ollama.Client, llm: FakeLLM) -> None:
    for stream in (False, True):
        made: Any = client_.chat("tiny", HELLO, logprobs=True, top_logprobs=2, stream=stream)
        parts = list(made) if stream else [made]
        entries = [entry for part in parts for entry in part.logprobs or ()]
        text = "".join(part.message.content or "" for part in parts)
        assert "".join(entry.token for entry in entries) == text
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_limit_beyond_the_context_is_cut_to_it(client_: ollama.Client, llm: FakeLLM) -> None:
    llm.endless = True
    for made in (
        client_.chat("tiny", HELLO, options={"num_predict": 10**9}),
        client_.generate("tiny", "hello", raw=True, options={"num_predict": 10**9}),
    ):
        assert (made.prompt_eval_count or 0) + (made.eval_count or 0) == CONTEXT
        assert made.done_reason == "length"


def test_names_with_the_latest_tag_are_the_registered_ones(client_: ollama.Client) -> None:
    assert client_.chat("tiny:latest", HELLO).model == "tiny:latest"
    assert client_.show("tiny:latest").capabilities
    for name in ("gone", "gone:latest", "tiny:8b", "../tiny", "/etc/passwd", "tiny\0"):
        with pytest.raises(ollama.ResponseError) as caught:
            client_.chat(name, HELLO)
        assert caught.value.status_code == 404
        assert f"no model {name!r} here; this server has: tiny" in caught.value.error


def test_models_are_listed_and_described(client_: ollama.Client, llm: FakeLLM, form: FakeFormat) -> None:
    (model,) = client_.list().models
    assert (model.model, model.size) == ("tiny", 1)
    assert len(model.digest or "") == 64
    (running,) = client_.ps().models
    assert (running.model, running.context_length) == ("tiny", CONTEXT)
    assert running.expires_at is not None
    assert running.expires_at.year > 2100, "given models stay"
    shown = client_.show("tiny")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert (shown.modelinfo or {})["fake.context_length"] == CONTEXT
    assert shown.details is not None
    assert shown.details.family == "fake"


def test_embeddings_come_from_the_models_own_method(
    client_: ollama.Client, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    async def aembed(texts: list[str], **options: Any) -> Any:
        asked.append((list(texts), options))
        return SimpleNamespace(vectors=[[float(len(t)), 0.5] for t in texts], prompt_tokens=sum(map(len, texts)))

    monkeypatch.setattr(llm, "info", dataclasses.replace(llm.info, makes="embeddings"))
    monkeypatch.setattr(llm, "aembed", aembed, raising=False)
    made = client_.embed("tiny", ["a", "bcd"], dimensions=2)
    assert made.embeddings == [[1.0, 0.5], [3.0, 0.5]]
    assert made.prompt_eval_count == 4
    assert asked == [(["a", "bcd"], {"dimensions": 2, "truncate": True})]
    assert client_.embed("tiny", "ab").embeddings == [[2.0, 0.5]]
    assert client_.embeddings("tiny", "ab").embedding == [2.0, 0.5]
    assert client_.embed("tiny", []).embeddings == []
    assert client_.embeddings("tiny", "").embedding == []
    client_.embed("tiny", "ab", truncate=False)
    assert asked[-1][1]["truncate"] is False


def test_vectors_that_are_made_when_a_shutdown_begins_are_sent(
    client: TestClient, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def aembed(texts: list[str], **_: Any) -> Any:
        client.app.state.server.inflight.drain()  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
        return SimpleNamespace(vectors=[[1.0]], prompt_tokens=1)

    monkeypatch.setattr(llm, "info", dataclasses.replace(llm.info, makes="embeddings"))
    monkeypatch.setattr(llm, "aembed", aembed, raising=False)
    answer = client.post("/api/embed", json={"model": "tiny", "input": "a"})
    assert (answer.status_code, answer.json()["embeddings"]) == (200, [[1.0]])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
        ("HEAD", "/api/blobs/sha256:00"),
    ],
)
def test_no_request_changes_which_models_there_are(client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, path, json={"model": "tiny"})
    assert answer.status_code == 403
    if method != "HEAD":
        assert "owner" in answer.json()["error"]


def test_failures_have_ollamas_shape(client: TestClient, llm: FakeLLM) -> None:
    for path, body, status in (
        ("/api/chat", {"model": "gone", "messages": HELLO}, 404),
        ("/api/chat", {"messages": HELLO, "nonsense": 1}, 400),
        ("/api/generate", {"prompt": "x" * 2_000_000}, 400),
        ("/api/embed", {"input": "x"}, 400),
        ("/api/embed", {"input": 5}, 400),
        ("/api/embed", {"input": ["x"] * 3000}, 400),
        ("/api/embeddings", {}, 400),
        ("/api/show", {"model": "gone"}, 404),
        ("/api/nothing", {}, 404),
        ("/api/tags", {}, 405),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == status, (path, answer.text)
        assert list(answer.json()) == ["error"]
        assert isinstance(answer.json()["error"], str)
    assert not llm.made


def test_a_failure_after_the_stream_began_is_its_last_line(client_: ollama.Client, llm: FakeLLM) -> None:
    llm.fail_after, llm.failure = 2, EngineError("the engine broke")
    with pytest.raises(ollama.ResponseError, match="the engine broke"):
        list(client_.chat("tiny", HELLO, stream=True))
    with pytest.raises(ollama.ResponseError, match="the engine broke"):
        client_.chat("tiny", HELLO)
    llm.fail_after = None
    assert client_.chat("tiny", HELLO).done


def test_a_client_that_leaves_cancels_the_work(client_: ollama.Client, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 0.01
    for stream in (client_.chat("tiny", HELLO, stream=True), client_.generate("tiny", "x", raw=True, stream=True)):
        next(iter(stream))
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert wait_for(lambda: llm.made[-1].cancelled.is_set())


def test_silence_is_filled_with_lines_that_clients_can_parse(llm: FakeLLM) -> None:
    llm.delay_s = 0.05
    app = create_app({"tiny": llm}, ServerOptions(keepalive_s=0.01))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE) as client:
        answer = client.post("/api/chat", json={"messages": HELLO})
    assert answer.headers["content-type"] == "application/x-ndjson"
    parsed = [json.loads(line) for line in answer.text.splitlines()]
    assert len(parsed) > 10
    assert len("".join(line["message"]["content"] for line in parsed)) == 6


def test_the_documented_curl_works_though_it_sends_a_form_type(client: TestClient) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello"})
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        answer = client.post("/api/generate", content=body, headers=headers)
        assert answer.status_code == 200
        assert json.loads(answer.text.splitlines()[-1])["done"] is True


def test_what_is_ignored_is_named(client: TestClient) -> None:
    body = {"messages": HELLO, "truncate": True, "options": {"num_ctx": 1, "seed": 1}}
    assert client.post("/api/chat", json=body).headers["x-mlxinfer-ignored"] == "truncate, options.num_ctx"


def test_the_server_says_what_it_is(client: TestClient) -> None:
    version = client.get("/api/version").json()
    assert version["mlxinfer"]
    assert version["version"].count(".") == 2
    assert client.head("/").status_code == 200
    assert "mlxinfer" in client.get("/").text


class _Loads:
    """Loads the one model there is."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm
        self.count = 0

    def predict(self, source: str, cancel: Any) -> int:
        return 1

    def load(self, source: str, cancel: Any) -> Any:
        self.count += 1
        return self.llm

    def budget(self) -> int:
        return 100

    def held(self) -> int:
        return 0


def test_a_request_without_a_prompt_loads_or_unloads_the_model(llm: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "unload", lambda: None, raising=False)
    monkeypatch.setattr(llm, "stats", lambda: {"running": 0, "waiting": 0})
    loads = _Loads(llm)
    pool = ModelPool({"tiny": "tiny"}, loads, keep_alive=600)
    with TestClient(create_app(pool), base_url=BASE) as client:

        def state() -> str:
            return pool.status()["tiny"].state

        assert client.get("/api/ps").json() == {"models": []}
        assert client.post("/api/show", json={"model": "tiny"}).json()["capabilities"] == ["completion"]
        for path, empty in (("/api/chat", {"messages": []}), ("/api/generate", {})):
            answer = client.post(path, json=empty).json()
            assert (answer["done"], answer["done_reason"], state()) == (True, "load", "loaded")
            assert client.post(path, json={**empty, "keep_alive": 0}).json()["done_reason"] == "unload"
            assert wait_for(lambda: state() == "registered")
        assert client.post("/api/chat", json={"messages": [], "keep_alive": 0}).json()["done_reason"] == "unload"
        assert loads.count == 2, "it is not loaded to be unloaded"

        client.post("/api/chat", json={"messages": HELLO, "keep_alive": "1h"})
        (running,) = client.get("/api/ps").json()["models"]
        left = datetime.datetime.fromisoformat(running["expires_at"]) - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(minutes=50) < left <= datetime.timedelta(hours=1)
        client.post("/api/chat", json={"messages": HELLO, "keep_alive": -1})
        assert pool.status()["tiny"].keep_s is None
        client.post("/api/chat", json={"messages": HELLO, "keep_alive": 0})
        assert wait_for(lambda: state() == "registered"), "it goes when the answer is out"
        client.post("/api/chat", json={"messages": HELLO})
        assert pool.status()["tiny"].keep_s == 600, "a wish ends with the model it was for"
    pool.close()
