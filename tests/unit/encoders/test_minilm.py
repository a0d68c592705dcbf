"""all-MiniLM-L6-v2 against its published architecture in float64, over the same files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from mlxinfer import zoo
from mlxinfer.config import load_settings
from mlxinfer.encoders import Encoder, load_encoder
from tests.unit.encoders import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = [
    "hello world", "", "a", "The quick brown fox jumps over the lazy dog.", "naïve über 東京 🦊 don't e-mail me!",
    "What is the capital of France?", "Paris is the capital of France. " * 9, "retrieval " * 400,
]  # fmt: skip
HELLO = (-0.0344772, 0.0310232, 0.0067350, 0.0261090)
"""The first numbers of "hello world", by torch 2.13 and transformers 5.24 in float32: BertModel, mean, normalised."""

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def minilm() -> Iterator[Encoder]:
    with load_encoder("all-minilm-l6-v2") as encoder:
        yield encoder


def test_embeddings_are_the_reference_s_to_1e_5(minilm: Encoder) -> None:
    folder = zoo.resolve("all-minilm-l6-v2", load_settings(), fetch=False).path
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Any] = {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(folder / "model.safetensors").items()
        if tensor.dtype == np.float32
    }
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.no_padding()
    own.enable_truncation(256)
    made = minilm.embed(TEXTS, truncate=True)
    assert minilm.info.context_length == 256
    assert made.truncated == (False,) * 7 + (True,)
    for text, vector, count in zip(TEXTS, made.vectors, made.token_counts, strict=True):
        ids = own.encode(text).ids
        wanted = reference.unit(reference.hidden_states(config, tensors, ids).mean(0))
        assert count == len(ids)
        assert 1 - float(vector @ wanted) < 1e-6
        np.testing.assert_allclose(vector, wanted, atol=2e-6)


def test_the_first_numbers_are_those_that_torch_gives(minilm: Encoder) -> None:
    np.testing.assert_allclose(minilm.embed(["hello world"]).vectors[0, :4], HELLO, atol=1e-6)


def test_related_texts_are_close(minilm: Encoder) -> None:
    scores = minilm.rerank("What is the capital of France?", ["Bananas are yellow.", "Paris is the capital of France."])
    assert scores[1] > 0.8 > 0.2 > scores[0]
