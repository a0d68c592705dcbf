"""Who is answered: Host, Origin, content type, the API key, and where the server may listen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import InvalidRequestError
from mlxinfer.pool import ModelPool
from mlxinfer.server.app import create_app
from mlxinfer.server.metrics import ServerMetrics
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.record import SCOPE_KEY, RequestRecord
from mlxinfer.server.run import bind
from mlxinfer.server.security import Guard
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

CHAT = "/v1/chat/completions"
BODY = '{"messages": [{"role": "user", "content": "hi"}]}'
JSON = {"content-type": "application/json"}


def client_with(base_url: str = BASE, **options) -> TestClient:
    app = create_app({"tiny": FakeLLM()}, ServerOptions(**options))  # pyright: ignore[reportArgumentType]
    return TestClient(app, base_url=base_url)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "user@127.0.0.1", "10.0.0.1", "", "a b"]
)
def test_a_foreign_host_is_a_421_on_every_path(client: TestClient, host: str) -> None:
    for path in ("/health", "/v1/models", "/nothing"):
        answer = client.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert answer.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8080", "LOCALHOST", "[::1]:8080", "localhost:1"])
def test_names_of_loopback_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "file://", ""])
def test_a_foreign_or_null_origin_is_a_403(client: TestClient, llm: FakeLLM, origin: str) -> None:
    answer = client.post(CHAT, content=BODY, headers=JSON | {"origin": origin})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "foreign_origin"
    assert "access-control-allow-origin" not in answer.headers
    assert not llm.made


def test_the_servers_own_origin_is_answered(client: TestClient) -> None:
    answer = client.post(CHAT, content=BODY, headers=JSON | {"origin": "http://127.0.0.1:8080"})
    assert answer.status_code == 200


def test_an_allowed_origin_gets_a_preflight_and_its_name_back() -> None:
    client = client_with(allowed_origins=frozenset({"http://localhost:3000"}))
    origin = {"origin": "http://localhost:3000"}
    preflight = client.options(CHAT, headers=origin | {"access-control-request-method": "POST"})
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    answer = client.post(CHAT, content=BODY, headers=JSON | origin)
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["vary"] == "origin"


def test_a_page_must_send_json_and_curl_need_not(client: TestClient) -> None:
    origin = {"origin": "http://127.0.0.1:8080"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        answer = client.post(CHAT, content=BODY, headers=origin | {"content-type": kind})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "content_type"
        assert client.post(CHAT, content=BODY, headers={"content-type": kind}).status_code == 200


def test_without_the_key_only_health_is_answered() -> None:
    client = client_with(api_key="sesame")
    assert client.get("/health").status_code == 200
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "sesame"}, {"authorization": "Basic x"}):
        answer = client.get("/v1/models", headers=given)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/models", headers={"authorization": "bearer sesame"}).status_code == 200


def test_a_key_in_bytes_that_are_not_ascii_is_just_wrong() -> None:
    answer = client_with(api_key="sesame").get("/v1/models", headers={b"authorization": "Bearer é".encode()})
    assert answer.status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "box.local"])
def test_listening_beyond_loopback_needs_a_key(host: str) -> None:
    with pytest.raises(InvalidRequestError, match="MLXINFER_API_KEY"):
        ServerOptions(host=host)
    assert ServerOptions(host=host, api_key="k").answers_to("192.168.1.7")
    assert not ServerOptions(host=host, api_key="k").answers_to("evil.example")


def test_a_taken_port_and_a_foreign_address_are_said_in_words() -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with pytest.raises(InvalidRequestError, match="taken"):
        bind("127.0.0.1", listener.getsockname()[1])
    listener.close()
    with pytest.raises(InvalidRequestError, match="host"):
        bind("no such host", 1)


def test_beyond_what_may_run_and_wait_a_post_is_refused_before_its_body_and_a_get_is_not() -> None:
    client = client_with(max_requests=0)
    answer = client.post(CHAT, content="{")
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.headers["retry-after"] == "1"
    assert client.get("/v1/models").status_code == 200
    client = client_with(max_requests=1)
    for body in ("{", BODY, "[]", BODY):
        assert client.post(CHAT, content=body).status_code in (200, 400), "each makes room when it ends"


def test_of_many_who_come_at_once_those_beyond_the_queue_hear_so_before_the_others_are_worked_on() -> None:
    happened: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        happened.append("worked on")
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def one(guard: Guard) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                happened.append(str(message["status"]))

        scope: Scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
        await guard(scope | {SCOPE_KEY: RequestRecord("1")}, receive, send)

    async def all_at_once() -> None:
        guard = Guard(app, ServerOptions(max_requests=3), ServerMetrics(ModelPool.of({})))
        await asyncio.gather(*(one(guard) for _ in range(10)))
        assert guard.working == 0, "nobody is counted for ever"

    asyncio.run(all_at_once())
    assert happened[:7] == ["429"] * 7
    assert happened[7:].count("200") == 3


def test_with_a_key_a_full_server_tells_strangers_nothing() -> None:
    client = client_with(max_requests=0, api_key="sesame")
    assert client.post(CHAT, content=BODY).status_code == 401
    assert client.post(CHAT, content=BODY, headers={"authorization": "Bearer sesame"}).status_code == 429
