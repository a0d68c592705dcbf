"""Qwen3's embedding models and rerankers, against float64 numpy; what their files leave out is known here."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mlxinfer.encoders import batching, encoder_kind, load_encoder, qwen3
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.encoders import reference, tiny

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["paris", "the quick brown fox jumps over the lazy dog. " * 4, "", "what is the capital of france?"]
END = 0  # <|endoftext|> in the tiny vocabulary


def expected(ids: list[int]) -> Any:
    tensors = {name: tensor.astype(np.float64) for name, tensor in tiny.qwen3_weights().items()}
    return reference.qwen3_hidden(tiny.QWEN3, tensors, ids)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_embedding_is_the_hidden_state_of_the_end_token(prefix: bool, tmp_path: Path) -> None:
    with load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-0.6B", prefix=prefix)) as encoder:
        assert encoder.prompts == qwen3.PROMPTS
        made = encoder.embed(TEXTS)
        for text, vector, count in zip(TEXTS, made.vectors, made.token_counts, strict=True):
            ids = [*encoder.tokenizer.encode(text), END]
            assert count == len(ids)
            np.testing.assert_allclose(vector, reference.unit(expected(ids)[-1]), atol=2e-6)


def test_a_prompt_goes_before_the_text(tmp_path: Path) -> None:
    with load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-0.6B")) as encoder:
        asked = encoder.embed(["paris"], prompt="query").vectors
        written = encoder.embed([qwen3.PROMPTS["query"] + "paris"]).vectors
        assert np.array_equal(asked, written)
        assert not np.array_equal(asked, encoder.embed(["paris"]).vectors)


def test_a_long_text_goes_through_in_pieces_to_the_same_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching.Speed, "pieces", lambda self, tokens: max(1, tokens // 40))
    ids = [[int(i) for i in np.random.default_rng(1).integers(0, 300, 333)]]
    with load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-0.6B")) as encoder:
        vector = encoder.embed(ids).vectors[0]
    np.testing.assert_allclose(vector, reference.unit(expected(ids[0])[-1]), atol=2e-6)


def test_a_reranker_gives_the_probability_of_yes(tmp_path: Path) -> None:
    documents = ["paris is the capital of france.", "the lazy dog"]
    with load_encoder(tiny.write_qwen3(tmp_path / "qwen3-reranker-0.6b")) as encoder:
        scores = encoder.rerank("what is the capital of france?", documents)
        encode = encoder.tokenizer.encode
        table = tiny.qwen3_weights()["model.embed_tokens.weight"].astype(np.float64)
        for document, score, count in zip(documents, scores, scores.token_counts, strict=True):
            text = f"<Instruct>: {qwen3.TASK}\n<Query>: what is the capital of france?\n<Document>: {document}"
            ids = [*encode(qwen3.BEFORE), *encode(text), *encode(qwen3.AFTER)]
            last = expected(ids)[-1]
            yes, no = (float(last @ table[encode(word)[0]]) for word in ("yes", "no"))
            assert score == pytest.approx(1 / (1 + math.exp(no - yes)), abs=5e-6)
            assert count == len(ids)


def test_truncation_keeps_the_end_token_and_a_reranker_s_question(tmp_path: Path) -> None:
    long = "the dog " * 400
    with load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-0.6B"), context_length=20) as encoder:
        made = encoder.embed([long], truncate=True)
        ids = [*encoder.tokenizer.encode(long)[:19], END]
        np.testing.assert_allclose(made.vectors[0], reference.unit(expected(ids)[-1]), atol=2e-6)
        assert (made.token_counts, made.truncated) == ((20,), (True,))


def test_what_a_decoder_is_for_is_told_from_its_names_and_files(tmp_path: Path) -> None:
    folder = tiny.write_qwen3(tmp_path / "models--Qwen--Qwen3-Embedding-0.6B" / "snapshots" / "0123")
    assert encoder_kind(folder) == "embedding"
    plain = tiny.write_qwen3(tmp_path / "mine")
    assert encoder_kind(plain) is None
    assert encoder_kind(plain, "qwen3-reranker-4b") == "reranker"
    (plain / "README.md").write_text("---\nbase_model: Qwen/Qwen3-Reranker-0.6B\n---\nnot like Qwen3-Embedding-8B")
    assert encoder_kind(plain) == "reranker"
    (plain / "README.md").write_text("---\nlicense: mit\n---\nIt was compared with Qwen3-Embedding-8B.")
    assert encoder_kind(plain) is None
    (plain / "modules.json").write_text("[]")
    assert encoder_kind(plain) == "embedding"
    assert encoder_kind(tmp_path / "nowhere") is None


def test_other_decoders_pool_as_sentence_transformers_files_say(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", pooling={"pooling_mode_mean_tokens": True})
    tiny.write_qwen3(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_eos_token": True, "eos_token": "<|im_end|>"}))
    with load_encoder(folder) as encoder:
        vector = encoder.embed(["paris"]).vectors[0]
        ids = [*encoder.tokenizer.encode("paris"), 2]
    np.testing.assert_allclose(vector, reference.unit(expected(ids).mean(0)), atol=2e-6)


def test_decoders_that_look_both_ways_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="looks both ways"):
        load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-0.6B", use_bidirectional_attention=True))


def test_a_reranker_without_its_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="lm_head"):
        load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Reranker-8B", tie_word_embeddings=False))
    with load_encoder(tiny.write_qwen3(tmp_path / "Qwen3-Embedding-8B", tie_word_embeddings=False)) as encoder:
        assert encoder.dimensions == tiny.HIDDEN
