"""Embeddings and rerank over HTTP, in front of an encoder that counts letters."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from mlxinfer.errors import EngineClosedError, InvalidRequestError
from mlxinfer.server.app import create_app
from mlxinfer.server.inflight import Inflight
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

URL, RERANK = "/v1/embeddings", "/v1/rerank"


@dataclass
class Made:
    vectors: list[np.ndarray]
    prompt_tokens: int


class Scores(list[float]):
    prompt_tokens = 7


class FakeEncoder(FakeLLM):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.info = dataclasses.replace(self.info, makes="embeddings")
        self.calls = 0

    async def aembed(self, inputs: Sequence[Any], *, dimensions: int | None = None) -> Made:
        if dimensions is not None and dimensions > 3:
            raise InvalidRequestError("dimensions is too large", param="dimensions")
        await asyncio.sleep(0)
        self.calls += 1
        vectors = [np.array([len(one), 0.1, -1], dtype=np.float32)[:dimensions] for one in inputs]
        return Made(vectors, sum(map(len, inputs)))

    async def arerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> Scores:
        assert truncate
        self.calls += 1
        return Scores(1 / (1 + abs(len(one) - len(query))) for one in documents)


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder("enc")


@pytest.fixture
def client(encoder: FakeEncoder) -> Iterator[TestClient]:
    app = create_app({"enc": encoder, "llm": FakeLLM("llm")})  # pyright: ignore[reportArgumentType]
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as made:
        yield made


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["a", "", "bb"], [1, 0, 2]), ([5, 6], [2]), ([[1, 2], [3]], [2, 1])],
)
def test_each_input_gets_its_vector_in_order(client: TestClient, given: Any, lengths: list[int]) -> None:
    answer = client.post(URL, json={"model": "enc", "input": given, "user": "me"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "list"
    assert body["model"] == "enc"
    assert [d["index"] for d in body["data"]] == list(range(len(lengths)))
    assert [d["embedding"][0] for d in body["data"]] == lengths
    assert body["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert answer.headers["x-mlxinfer-ignored"] == "user"


def test_base64_holds_the_same_float32s(client: TestClient) -> None:
    floats = client.post(URL, json={"model": "enc", "input": "abc", "encoding_format": "float"}).json()
    coded = client.post(URL, json={"model": "enc", "input": "abc", "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == floats["data"][0]["embedding"]


def test_dimensions_reach_the_encoder(client: TestClient) -> None:
    answer = client.post(URL, json={"model": "enc", "input": "abc", "dimensions": 2})
    assert len(answer.json()["data"][0]["embedding"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [2**31]}, "input"),
        ({"input": [10**4000]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "wizardry": 1}, "wizardry"),
    ],
)
def test_a_bad_input_is_a_400_that_names_it(
    client: TestClient, encoder: FakeEncoder, body: dict[str, Any], param: str
) -> None:
    answer = client.post(URL, json={"model": "enc", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert encoder.calls == 0


def test_documents_come_back_the_most_relevant_first(client: TestClient) -> None:
    body = {"model": "enc", "query": "abc", "documents": ["abcdef", {"text": "xyz"}, "ab"]}
    found = client.post(RERANK, json=body).json()
    assert [r["index"] for r in found["results"]] == [1, 2, 0]
    scores = [r["relevance_score"] for r in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert "document" not in found["results"][0]
    assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    found = client.post(RERANK, json=body | {"top_n": 1, "return_documents": True}).json()
    assert [(r["index"], r["document"]) for r in found["results"]] == [(1, {"text": "xyz"})]
    assert len(client.post(RERANK, json=body | {"top_n": 99}).json()["results"]) == 3


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", 5]}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents[0]"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["title"]}, "rank_fields"),
    ],
)
def test_a_bad_rerank_is_a_400_that_names_the_field(
    client: TestClient, encoder: FakeEncoder, changes: dict[str, Any], param: str
) -> None:
    answer = client.post(RERANK, json={"model": "enc", "query": "a", "documents": ["b"], **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)
    assert encoder.calls == 0


@pytest.mark.parametrize(("url", "body"), [(URL, {"input": "a"}), (RERANK, {"query": "a", "documents": ["b"]})])
def test_a_model_that_chats_makes_no_vectors_and_says_so(client: TestClient, url: str, body: dict[str, Any]) -> None:
    answer = client.post(url, json={"model": "llm", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    assert "llm" in answer.json()["error"]["message"]


def test_an_ended_answer_is_told_to_the_metrics(client: TestClient) -> None:
    client.post(URL, json={"model": "enc", "input": ["abc", "d"]})
    app: Any = client.app
    labels = {"model": "enc", "reason": "stop"}
    assert app.state.server.metrics.registry.get_sample_value("mlxinfer_generations_total", labels) == 1


def test_a_shutdown_ends_an_encoder_that_is_at_work() -> None:
    async def forever() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        inflight = Inflight()
        waiting = asyncio.create_task(inflight.ended(forever()))
        await asyncio.sleep(0)
        inflight.end_all()
        with pytest.raises(EngineClosedError):
            await waiting

    asyncio.run(run())


def test_an_encoder_does_not_chat_and_says_so(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"model": "enc", "messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
