"""What the routes take from a request's scope, and what they leave in it: keys, priorities, log and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from mlxinfer.server.app import create_app
from mlxinfer.server.keys import ApiKey, digest_of
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.record import RequestRecord, record_of
from tests.unit.server.conftest import BASE
from tests.unit.server.test_completions import CHAT, HELLO, TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.server.fake import FakeLLM

ANN, BOB = ({"authorization": f"Bearer secret-{name}"} for name in ("ann", "bob"))
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HELLO}),
    (TEXT, {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello"}),
]


class Outer:
    """Stands in front of the app and keeps the records that its access log is written from."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.records: list[RequestRecord] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)
        if scope["type"] == "http":
            self.records.append(record_of(scope))


@pytest.fixture
def outer(llm: FakeLLM) -> Outer:
    keys = tuple(ApiKey(name, digest_of(f"secret-{name}")) for name in ("ann", "bob"))
    return Outer(create_app({"tiny": llm}, ServerOptions(keys=keys)))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def keyed(outer: Outer) -> Iterator[TestClient]:
    with TestClient(outer, base_url=BASE, raise_server_exceptions=False, headers=ANN) as made:
        yield made


@pytest.mark.parametrize(("url", "body"), REQUESTS)
def test_the_keys_name_is_the_tenant_that_shares_a_prefix(
    keyed: TestClient, llm: FakeLLM, url: str, body: dict[str, Any]
) -> None:
    assert keyed.post(url, json=body).status_code == 200
    assert llm.made[-1].options["tenant"] == "ann"


def test_a_response_is_its_own_keys_only(keyed: TestClient) -> None:
    made = keyed.post("/v1/responses", json={"input": "a secret"}).json()
    url = f"/v1/responses/{made['id']}"
    assert keyed.get(url).status_code == 200
    assert keyed.get(url, headers=BOB).status_code == 404
    assert keyed.delete(url, headers=BOB).status_code == 404
    going_on = {"input": "and?", "previous_response_id": made["id"]}
    assert keyed.post("/v1/responses", json=going_on, headers=BOB).status_code == 400
    assert keyed.post("/v1/responses", json=going_on).status_code == 200
    assert keyed.delete(url).status_code == 200


@pytest.mark.parametrize(("url", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_log_and_metrics_hear_of_every_answer(
    keyed: TestClient, outer: Outer, llm: FakeLLM, url: str, body: dict[str, Any], stream: bool
) -> None:
    llm.cached = 2
    n = 1 if url == "/v1/responses" else 2
    assert keyed.post(url, json=body | {"stream": stream} | ({"n": n} if n > 1 else {})).status_code == 200
    record = outer.records[-1]
    assert record.model == "tiny"
    assert record.completion_tokens == 6 * n
    assert record.prompt_tokens == llm.made[-1].prompt_tokens
    assert record.cached_tokens == 2
    registry = outer.app.state.server.metrics.registry
    labels = {"model": "tiny", "reason": "stop"}
    assert registry.get_sample_value("mlxinfer_generations_total", labels) == n
    assert registry.get_sample_value("mlxinfer_generation_seconds_count", {"model": "tiny"}) == n


@pytest.mark.parametrize(("url", "body"), REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_what_an_error_cut_short_is_counted_once(
    keyed: TestClient, outer: Outer, llm: FakeLLM, url: str, body: dict[str, Any], stream: bool
) -> None:
    llm.fail_after = 2
    keyed.post(url, json=body | {"stream": stream})
    record = outer.records[-1]
    assert (record.completion_tokens, record.prompt_tokens) == (2, llm.made[-1].prompt_tokens)
    registry = outer.app.state.server.metrics.registry
    labels = {"model": "tiny", "reason": "cancelled"}
    assert registry.get_sample_value("mlxinfer_generations_total", labels) == 1
