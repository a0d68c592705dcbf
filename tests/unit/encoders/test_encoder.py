"""The encoder as its users see it: texts in, numbers out, errors that help, and no request that holds up others."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mlxinfer
from mlxinfer.encoders import Encoder, load_encoder
from mlxinfer.encoders.batching import Job, Speed
from mlxinfer.engine.governor import governor
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedModelError,
)
from tests import tiny as chat_tiny
from tests.unit.encoders import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MEAN = {"pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    with load_encoder(tiny.write_folder(tmp_path_factory.mktemp("e") / "m", pooling=MEAN)) as made:
        yield made


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encoder]:
    with load_encoder(tiny.write_folder(tmp_path_factory.mktemp("r") / "m", scores=True)) as made:
        yield made


class Gate:
    """Holds the MLX thread until it is opened, so that requests gather."""

    def __init__(self) -> None:
        self._open = threading.Event()
        mlx_thread().post(self._hold)

    def _hold(self) -> None:
        self._open.wait(20)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()


def submitted(encoder: Encoder, texts: list[str]) -> Job:
    return encoder._submit(encoder._embed_rows(texts, None, None, False))


def test_texts_of_all_lengths(encoder: Encoder) -> None:
    texts = ["", "paris", *[" ".join(["the fox"] * (i % 40 + 1)) for i in range(298)]]
    made = encoder.embed(texts)
    assert made.vectors.shape == (300, tiny.HIDDEN)
    assert made.vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(made.vectors, axis=1), 1, atol=1e-6)
    assert made.token_counts[:2] == (2, 3)
    assert made.prompt_tokens == sum(made.token_counts)
    for i in (0, 1, 2, 41, 299):
        np.testing.assert_allclose(made.vectors[i], encoder.embed([texts[i]]).vectors[0], atol=1e-6)


def test_no_texts_are_no_embeddings(encoder: Encoder) -> None:
    assert encoder.embed([]).vectors.shape == (0, tiny.HIDDEN)


def test_token_ids_are_read_as_they_are(encoder: Encoder) -> None:
    ids = encoder.tokenizer.encode("paris is")
    assert np.array_equal(encoder.embed([ids]).vectors, encoder.embed(["paris is"]).vectors)
    assert not np.array_equal(encoder.embed([ids[1:-1]]).vectors, encoder.embed(["paris is"]).vectors)


def test_too_long_is_an_error_or_is_cut(encoder: Encoder) -> None:
    long = "the fox " * 60
    with pytest.raises(ContextLengthError, match="text 1 has 122 tokens and the model reads 96"):
        encoder.embed(["paris", long])
    with pytest.raises(ContextLengthError, match="text 0 has 97 tokens"):
        encoder.embed([[5] * 97])
    made = encoder.embed(["paris", long, [5] * 97], truncate=True)
    assert made.truncated == (False, True, True)
    assert made.token_counts == (3, 96, 96)
    cut = [*encoder.tokenizer.encode(long)[:95], 3]
    np.testing.assert_allclose(made.vectors[1], encoder.embed([cut]).vectors[0], atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_normalised_again(encoder: Encoder) -> None:
    whole = encoder.embed(["paris"]).vectors[0]
    part = encoder.embed(["paris"], dimensions=5).vectors[0]
    np.testing.assert_allclose(part, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)


@pytest.mark.parametrize("dimensions", [0, -1, 33, 2.0, True, "5"])
def test_dimensions_out_of_range_are_refused(encoder: Encoder, dimensions: Any) -> None:
    with pytest.raises(InvalidRequestError, match="makes 1 to 32") as error:
        encoder.embed(["paris"], dimensions=dimensions)
    assert error.value.param == "dimensions"


@pytest.mark.parametrize(
    "texts", ["paris", b"x", 5, None, [5], [None], [["a"]], [[True]], [[]], [[40]], [[-1]], ["\ud800"]]
)
def test_what_is_no_list_of_texts_is_refused(encoder: Encoder, texts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        encoder.embed(texts)
    assert encoder.embed(["paris"]).vectors.shape == (1, tiny.HIDDEN)


@pytest.mark.parametrize(("query", "documents"), [(5, ["a"]), ("a", "b"), ("a", [5]), ("a", [[1, 2]]), (None, [])])
def test_what_is_no_query_and_documents_is_refused(reranker: Encoder, query: Any, documents: Any) -> None:
    with pytest.raises(InvalidRequestError):
        reranker.rerank(query, documents)


def test_each_kind_says_what_it_cannot_do(encoder: Encoder, reranker: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="is a reranker"):
        reranker.embed(["paris"])
    with pytest.raises(UnsupportedModelError, match="load_encoder"):
        mlxinfer.load(tiny.write_folder(tmp_path / "e"))
    with pytest.raises(UnsupportedModelError, match=r"mlxinfer\.load"):
        load_encoder(chat_tiny.write_folder(tmp_path / "m"))
    assert encoder.info.makes == "embeddings"


def test_an_embedding_model_reranks_by_the_cosine(encoder: Encoder) -> None:
    documents = ["banana", "paris is the capital", "what is paris"]
    scores = encoder.rerank("what is paris", documents)
    vectors = encoder.embed([*documents, "what is paris"]).vectors
    np.testing.assert_allclose(scores, vectors[:3] @ vectors[3], atol=1e-6)
    assert scores[2] == pytest.approx(1)
    assert len(scores.token_counts) == 4


def test_a_long_document_is_cut_and_not_the_question(reranker: Encoder) -> None:
    with pytest.raises(ContextLengthError):
        reranker.rerank("what is paris", ["the fox " * 60])
    made = reranker.rerank("what is paris", ["the fox " * 60, "paris"], truncate=True)
    assert made.truncated == (True, False)
    assert made.token_counts[0] == 96


def test_requests_at_the_same_time_share_forwards(encoder: Encoder) -> None:
    before = encoder.stats()["steps"]
    with Gate():
        jobs = [submitted(encoder, [f"paris is {w}"]) for w in tiny.WORDS]
        assert encoder.stats()["running"] + encoder.stats()["waiting"] == len(jobs)
    results = [job.future.result(20)[0] for job in jobs]
    assert encoder.stats()["steps"] - before < len(jobs)
    for word, result in zip(tiny.WORDS, results, strict=True):
        np.testing.assert_allclose(result, encoder.embed([f"paris is {word}"]).vectors[0], atol=1e-6)
    assert encoder.stats()["running"] + encoder.stats()["waiting"] == 0


def test_a_cancelled_request_runs_no_more_and_the_others_do(encoder: Encoder) -> None:
    async def both() -> Any:
        gone = asyncio.create_task(encoder.aembed(["the fox " * 40] * 200))
        while encoder.stats()["waiting"] < 1:
            await asyncio.sleep(0.001)
        kept = asyncio.create_task(encoder.aembed(["paris"]))
        while encoder.stats()["waiting"] < 2:
            await asyncio.sleep(0.001)
        gone.cancel()
        return await asyncio.gather(gone, kept, return_exceptions=True)

    before = encoder.stats()["prompt_tokens"]
    with Gate() as gate:
        threading.Timer(0.3, gate.__exit__).start()
        gone, kept = asyncio.run(both())
    assert isinstance(gone, asyncio.CancelledError)
    assert kept.vectors.shape == (1, tiny.HIDDEN)
    assert encoder.stats()["prompt_tokens"] - before < 200 * 82


def test_async_and_sync_give_the_same(encoder: Encoder, reranker: Encoder) -> None:
    assert np.array_equal(asyncio.run(encoder.aembed(["paris"])).vectors, encoder.embed(["paris"]).vectors)
    assert asyncio.run(reranker.arerank("paris", ["a", "b"])) == reranker.rerank("paris", ["a", "b"])


def test_beyond_the_queue_is_an_error_at_once(tmp_path: Path) -> None:
    with load_encoder(tiny.write_folder(tmp_path / "m"), max_queue=2) as own:
        with Gate():
            jobs = [submitted(own, ["paris"]) for _ in range(2)]
            with pytest.raises(QueueFullError, match="the limit is 2"):
                own.embed(["paris"])
        assert [len(job.future.result(20)) for job in jobs] == [1, 1]
        assert own.embed(["paris"]).prompt_tokens == 3


def test_a_failed_forward_fails_its_own_texts_only(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    network: Any = encoder._runner._network
    run = network.run

    def broken(ids: Any, types: Any, lengths: Any, pieces: int) -> Any:
        if max(lengths) > 50:
            raise RuntimeError("no memory")
        return run(ids, types, lengths, pieces)

    monkeypatch.setattr(network, "run", broken)
    with Gate():
        bad = submitted(encoder, ["the fox " * 30, "paris"])
        good = submitted(encoder, ["paris is"])
    with pytest.raises(EngineError, match="no memory"):
        bad.future.result(20)
    assert len(good.future.result(20)) == 1


def test_unloading_ends_requests_and_leaves_the_governor(tmp_path: Path) -> None:
    own = load_encoder(tiny.write_folder(tmp_path / "m"))
    own.embed(["paris"])
    assert governor().figures().weights >= own.info.weight_bytes > 0
    with_it = governor().figures().weights
    with Gate():
        job = submitted(own, ["paris"])
        closer = threading.Thread(target=own.unload)
        mlx_thread().post(own._runner.close)
        closer.start()
    with pytest.raises(EngineClosedError):
        job.future.result(20)
    closer.join(20)
    assert governor().figures().weights == with_it - own.info.weight_bytes
    with pytest.raises(EngineClosedError, match="unloaded"):
        own.embed(["paris"])
    own.unload()


def test_an_encoder_nobody_holds_is_unloaded(tmp_path: Path) -> None:
    own = load_encoder(tiny.write_folder(tmp_path / "m"))
    runner = own._runner
    del own
    gc.collect()
    for _ in range(200):
        if runner.closed:
            break
        time.sleep(0.01)
    assert runner.closed


def test_a_stream_goes_on_while_many_texts_are_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speed, "observe", lambda self, tokens, seconds: None)
    with (
        mlxinfer.load(chat_tiny.write_folder(tmp_path / "llm")) as llm,
        load_encoder(tiny.write_folder(tmp_path / "m")) as own,
    ):
        with Gate():
            job = submitted(own, ["the fox " * 40] * 400)
            generation = llm.submit([5, 6, 7], mlxinfer.SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        reply = generation.result()
        assert len(reply.token_ids) == 30
        assert not job.future.done(), "the reply didn't wait for the texts"
        assert len(job.future.result(60)) == 400
