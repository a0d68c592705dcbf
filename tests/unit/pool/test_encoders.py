"""Embedding models beside models that write text, in one pool: loaded, leased, unloaded and counted alike."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlxinfer.config import Settings
from mlxinfer.encoders import Encoder
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import InvalidRequestError
from mlxinfer.llm import LLM
from mlxinfer.pool import Machine, ModelPool
from mlxinfer.server.app import create_app
from tests import tiny as chat_tiny
from tests.unit.encoders import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLACK = 2**14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("pool")
    made = {
        "chat": chat_tiny.write_folder(base / "chat"),
        "embed": tiny.write_folder(base / "embed", pooling={"pooling_mode_mean_tokens": True}),
        "rank": tiny.write_folder(base / "rank", scores=True),
    }
    return {name: str(folder) for name, folder in made.items()}


@pytest.fixture
def pool(folders: dict[str, str], tmp_path: Path) -> Iterator[ModelPool]:
    made = ModelPool(folders, Machine(Settings(cache_dir=tmp_path)), keep_alive=None)
    yield made
    made.close()


def test_each_kind_is_loaded_as_what_it_is(pool: ModelPool) -> None:
    with pool.acquire("chat") as chat, pool.acquire("embed") as embed, pool.acquire("rank") as rank:
        assert isinstance(chat.model, LLM)
        assert chat.llm is chat.model
        assert isinstance(embed.model, Encoder)
        assert embed.encoder is embed.model
        assert embed.encoder.embed(["paris"]).vectors.shape == (1, tiny.HIDDEN)
        assert len(rank.encoder.rerank("paris", ["a", "b"])) == 2
    infos = {name: status.info for name, status in pool.status().items()}
    assert [info.makes for info in infos.values() if info] == ["text", "embeddings", "scores"]


def test_what_a_model_cannot_do_is_a_400(pool: ModelPool) -> None:
    with pool.acquire("chat") as chat, pytest.raises(InvalidRequestError, match="chat writes text") as error:
        _ = chat.encoder
    assert (error.value.status, error.value.param) == (400, "model")
    with pool.acquire("embed") as embed, pytest.raises(InvalidRequestError, match="embed makes embeddings"):
        _ = embed.llm
    with pool.acquire("rank") as rank, pytest.raises(InvalidRequestError, match="rank reranks"):
        _ = rank.llm
    with pytest.raises(InvalidRequestError), pool.lease("embed"):
        pass
    pool.unload("embed")
    assert pool.status()["embed"].state == "registered", "no lease is left over"


def test_an_encoder_makes_room_like_any_model_and_its_memory_comes_back(pool: ModelPool) -> None:
    gc.collect()
    before = mlx_thread().call(mx.get_active_memory)
    with pool.acquire("embed") as lease:
        lease.encoder.embed(["paris"])
    weights = pool.status()["embed"].bytes
    assert mx.get_active_memory() - before >= weights > 0
    del lease
    assert pool.relieve(1)
    for _ in range(2000):
        if pool.status()["embed"].state == "registered":
            break
        mlx_thread().call(lambda: None)
    assert pool.status()["embed"].state == "registered"
    gc.collect()
    assert mlx_thread().call(mx.get_active_memory) <= before + SLACK


def test_a_pinned_encoder_stays(pool: ModelPool) -> None:
    pool.pin("embed")
    with pool.acquire("embed"):
        pass
    assert not pool.relieve(1)
    assert pool.status()["embed"].pinned


def test_an_encoder_at_work_is_not_unloaded(pool: ModelPool) -> None:
    with pool.acquire("embed") as lease:
        job = lease.encoder._submit(lease.encoder._embed_rows(["the fox " * 40] * 500, None, None, False))
    assert pool.status()["embed"].running + pool.status()["embed"].waiting == 1 or job.future.done()
    assert not pool.relieve(1) or job.future.done()
    assert len(job.future.result(60)) == 500


def test_the_server_lists_an_encoder_and_refuses_to_chat_with_it(pool: ModelPool) -> None:
    with TestClient(create_app(pool), base_url="http://127.0.0.1:8080") as client:
        message = {"model": "embed", "messages": [{"role": "user", "content": "Hi"}]}
        answer = client.post("/v1/chat/completions", json=message)
        assert answer.status_code == 400
        assert "embed makes embeddings; it writes no text" in answer.json()["error"]["message"]
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards["embed"]["makes"] == "embeddings"
        assert client.get("/health").json()["models"]["embed"] == {"status": "ok", "running": 0, "waiting": 0}
    pool.unload("embed")
