"""What is counted and charged of requests whose client left, or whose body turned out to be no HTTP."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mlxinfer.server.app import create_app
from mlxinfer.server.keys import ApiKey
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM, wait_for
from tests.unit.server.test_sockets import BODY, Address, exchange, request

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT, RAW = "/v1/chat/completions", {"model": "tiny", "prompt": "hi", "raw": True, "stream": True}


def samples(address: Address) -> dict[tuple[str, ...], float]:
    reply = exchange(address, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return {
        (s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(reply.split(b"\r\n\r\n", 1)[1].decode())
        for s in family.samples
        if not s.name.endswith("_created")
    }


def leave_after(address: Address, data: bytes, wait: Any) -> None:
    with socket.create_connection(address, 10) as connection:
        connection.sendall(data)
        assert wait_for(wait)


def aborted(address: Address) -> float:
    return samples(address)["mlxinfer_aborted_requests_total",]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/v1/nothing"])
def test_a_body_that_is_no_http_is_one_400_whether_or_not_its_route_reads_it(
    address: Address, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = exchange(address, head.encode() + b"zz\r\n")
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1
    found = samples(address)
    assert found["mlxinfer_errors_total", "code=invalid_http"] == 1
    assert ("mlxinfer_errors_total", "code=internal_error") not in found
    assert [key[1] for key in found if key[0] == "mlxinfer_http_requests_total"] == ["code=400"]
    assert "Exception in ASGI application" not in caplog.text


def test_a_body_that_breaks_off_into_no_http_while_it_is_read_is_counted_once(address: Address) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    with socket.create_connection(address, 10) as connection:
        connection.sendall(head)
        time.sleep(0.1)
        connection.sendall(b"zz\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    route = "route=/v1/completions"
    assert wait_for(lambda: ("mlxinfer_http_requests_total", "code=400", "method=POST", route) in samples(address))
    assert aborted(address) == 0


def test_a_client_that_leaves_before_its_answer_is_counted_without_a_status(address: Address, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 0.01
    leave_after(address, request(BODY), lambda: len(llm.made) == 1)
    leave_after(address, request(BODY)[:-5], lambda: True)
    assert wait_for(lambda: aborted(address) == 2)
    found = samples(address)
    codes = {key[1]: value for key, value in found.items() if f"route={CHAT}" in key and len(key) == 4}
    assert codes == {"code=none": 2}


def test_a_stream_that_is_left_has_the_status_it_began_with(address: Address, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 0.01
    with socket.create_connection(address, 10) as connection:
        connection.sendall(request(BODY | {"stream": True}))
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert wait_for(lambda: aborted(address) == 1)
    assert samples(address)["mlxinfer_http_requests_total", "code=200", "method=POST", f"route={CHAT}"] == 1


def test_a_raw_text_that_is_left_is_counted_as_cancelled(address: Address, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 0.01
    leave_after(address, request(RAW, path="/api/generate"), lambda: len(llm.made) == 1)
    assert wait_for(lambda: samples(address).get(("mlxinfer_generations_total", "model=tiny", "reason=cancelled")) == 1)


@pytest.fixture
def limited(llm: FakeLLM) -> Iterator[TestClient]:
    keys = (ApiKey.of("anna", "sesame", max_tokens_per_minute=10),)
    app = create_app({"tiny": llm}, ServerOptions(keys=keys))  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE, headers={"x-api-key": "sesame"}) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", RAW),
        ("/api/chat", BODY | {"model": "tiny", "seed": None, "options": {}}),
        (CHAT, BODY | {"stream": True}),
        ("/v1/completions", {"prompt": "hi", "stream": True}),
    ],
)
def test_a_reply_that_fails_in_the_middle_is_charged_on_every_api(
    limited: TestClient, llm: FakeLLM, path: str, body: dict[str, Any]
) -> None:
    llm.fail_after, llm.endless = 20, True
    body = {name: value for name, value in body.items() if value is not None}
    answer = limited.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "error" in answer.text
    assert limited.get("/v1/models").status_code == 429
