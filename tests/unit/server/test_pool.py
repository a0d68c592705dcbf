"""Models that are loaded when a request names them: who waits, who is told what, and how long a model is held."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import ModelFileError, ModelNotFoundError
from mlxinfer.pool import ModelPool
from mlxinfer.server.app import create_app
from mlxinfer.server.errors import HttpError
from mlxinfer.server.options import ServerOptions
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.server.state import ServerState

MESSAGES = [{"role": "user", "content": "hi"}]


class Idle(FakeLLM):
    """A model whose figures don't claim that requests run."""

    def stats(self) -> dict[str, int]:
        return {"running": 0, "waiting": 0}

    def unload(self) -> None:
        self.alive = False


class OneAtATime:
    """Memory for one model; each load waits for its gate, if it has one."""

    def __init__(self) -> None:
        self.here: list[Idle] = []
        self.loads: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.errors: dict[str, Exception] = {}

    def predict(self, source: str, cancel: threading.Event) -> int:
        return 1

    def load(self, source: str, cancel: threading.Event) -> Any:
        self.loads.append(source)
        while (gate := self.gates.get(source)) is not None and not gate.wait(0.01):
            if cancel.is_set():
                raise ModelFileError("cancelled")
        if source in self.errors:
            raise self.errors[source]
        self.here.append(Idle(source))
        return self.here[-1]

    def budget(self) -> int:
        return 1

    def held(self) -> int:
        return sum(llm.alive for llm in self.here)


@pytest.fixture
def loads() -> OneAtATime:
    return OneAtATime()


@pytest.fixture
def pool(loads: OneAtATime) -> Iterator[ModelPool]:
    made = ModelPool({"a": "path/of/a", "b": "path/of/b"}, loads, due=["a"])
    yield made
    made.close()


@pytest.fixture
def client(pool: ModelPool) -> Iterator[TestClient]:
    app = create_app(pool, ServerOptions(api_key=None))
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as made:
        yield made


def ask(client: TestClient, model: str, **fields: Any) -> Any:
    return client.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, **fields})


def states(client: TestClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in client.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_loads_its_model_and_lets_go_of_it_at_its_end(
    client: TestClient, pool: ModelPool, loads: OneAtATime, stream: bool
) -> None:
    assert states(client) == {"a": "registered", "b": "registered"}
    assert ask(client, "a", stream=stream).status_code == 200
    assert states(client) == {"a": "loaded", "b": "registered"}
    assert ask(client, "b", stream=stream).status_code == 200
    assert states(client) == {"a": "registered", "b": "loaded"}, "nothing holds a model once its answer is out"
    assert loads.loads == ["path/of/a", "path/of/b"]
    assert pool.status()["b"].idle_s is not None


def test_what_is_known_of_a_model_is_listed_after_it_was_unloaded_too(client: TestClient, pool: ModelPool) -> None:
    assert "context_length" not in client.get("/v1/models/a").json()
    ask(client, "a")
    pool.unload("a")
    card = client.get("/v1/models/a").json()
    assert (card["state"], card["context_length"], card["model_type"]) == ("registered", 4096, "fake")


def test_a_bad_request_and_an_unknown_model_load_nothing(client: TestClient, loads: OneAtATime) -> None:
    assert ask(client, "a", temperature=-1).status_code == 400
    unknown = ask(client, "path/of/a")
    assert unknown.status_code == 404
    assert "a, b" in unknown.json()["error"]["message"]
    assert client.get("/v1/models/path/of/a").status_code == 404
    assert loads.loads == []


def test_a_request_that_is_refused_after_the_load_lets_go_of_the_model(client: TestClient, pool: ModelPool) -> None:
    assert ask(client, "a", max_tokens=10_000).status_code == 400
    pool.unload("a")


def test_a_busy_model_in_the_way_is_a_503_with_retry_after(client: TestClient, pool: ModelPool) -> None:
    with pool.lease("a"):
        refused = ask(client, "b")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "models_busy"
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(client, "b").status_code == 200


def test_an_error_of_loading_is_the_answer_and_health_stays_200(client: TestClient, loads: OneAtATime) -> None:
    loads.errors["path/of/a"] = ModelNotFoundError("there is no model at /home/me/path/of/a")
    answer = ask(client, "a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_load_failed")
    assert "/home/me" not in answer.text, "where files are is not for clients"
    assert ask(client, "b").status_code == 200
    health = client.get("/health")
    assert health.status_code == 200
    assert {name: model["status"] for name, model in health.json()["models"].items()} == {"a": "failed", "b": "ok"}


def test_ready_says_what_is_missing_and_health_does_not_mind(client: TestClient, loads: OneAtATime) -> None:
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "loading", "missing": {"a": "registered"}})
    assert client.get("/health").json()["models"]["a"] == {"status": "registered", "running": 0, "waiting": 0}
    gate = loads.gates["path/of/a"] = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, client, "a")
        assert wait_for(lambda: loads.loads)
        assert client.get("/ready").json()["missing"] == {"a": "loading"}
        assert client.get("/health").json()["models"]["a"]["waiting"] == 1
        gate.set()
        assert answer.result(10).status_code == 200
    assert (client.get("/ready").status_code, client.get("/ready").json()["status"]) == (200, "ready")
    loads.here[0].alive = False
    assert client.get("/health").status_code == 503, "a loaded model whose engine is dead is another matter"
    ready = client.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "dead", "missing": {"a": "dead"}})


def test_ready_needs_no_key(pool: ModelPool) -> None:
    with TestClient(create_app(pool, ServerOptions(api_key="k")), base_url=BASE) as client:
        assert client.get("/ready").status_code == 503
        assert client.get("/v1/models").status_code == 401


async def _never() -> Any:
    await asyncio.Event().wait()


def state_of(pool: ModelPool) -> ServerState:
    return create_app(pool).state.server


def test_a_client_that_leaves_while_its_model_loads_takes_the_load_from_nobody(
    pool: ModelPool, loads: OneAtATime
) -> None:
    gate = loads.gates["path/of/a"] = threading.Event()

    async def run() -> None:
        state, leave = state_of(pool), asyncio.Event()

        async def leaves() -> Any:
            await leave.wait()
            return {"type": "http.disconnect"}

        first = asyncio.create_task(state.lease("a", leaves))
        second = asyncio.create_task(state.lease("a", _never))
        while pool.status()["a"].waiting < 2:
            await asyncio.sleep(0)
        leave.set()
        with pytest.raises(HttpError, match="left"):
            await first
        gate.set()
        (await second).release()
        pool.unload("a")

    asyncio.run(asyncio.wait_for(run(), 20))
    assert loads.loads == ["path/of/a"]


def test_a_shutdown_answers_who_waits_for_a_load_at_once(pool: ModelPool, loads: OneAtATime) -> None:
    loads.gates["path/of/a"] = threading.Event()

    async def run() -> None:
        state = state_of(pool)
        waiting = asyncio.create_task(state.lease("a", _never))
        while not pool.status()["a"].waiting:
            await asyncio.sleep(0)
        state.inflight.drain()
        with pytest.raises(HttpError, match="shutting down"):
            await waiting
        assert pool.status()["a"].waiting == 0

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("error", [ModelNotFoundError("nothing at /home/me/a"), OSError("/home/me/a is on fire")])
def test_where_files_are_is_not_told_while_the_last_loads_error_is_the_answer(
    client: TestClient, loads: OneAtATime, error: Exception
) -> None:
    loads.errors["path/of/a"] = error
    answers = [ask(client, "a") for _ in range(3)]
    assert loads.loads == ["path/of/a"], "the others came too soon for another try"
    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(500, "model_load_failed")] * 3
    assert all("/home/me" not in a.text for a in answers)
