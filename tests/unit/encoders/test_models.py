"""Every architecture against float64 numpy over the same tensors; nothing depends on what else is in the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxinfer.encoders import layers as layers_module
from mlxinfer.encoders import load_encoder
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.encoders import reference, tiny

if TYPE_CHECKING:
    from pathlib import Path

RNG = np.random.default_rng(5)
TOLERANCE = 5e-6
"""Of numbers up to 3, in float32 through layers of large random weights."""
LENGTHS = (1, 2, 3, 17, 16, 40, 39, 90, 5, 5)
IDS = [[int(i) for i in RNG.integers(0, tiny.VOCAB, length)] for length in LENGTHS]


def float64(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


def expected(family: str, ids: list[int], mode: str = "mean") -> Any:
    tensors = float64(tiny.weights(tiny.CONFIGS[family]))
    return reference.pooled(reference.hidden_states(tiny.CONFIGS[family], tensors, ids), mode)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_embeddings_are_those_of_the_published_architecture(family: str, tmp_path: Path) -> None:
    with load_encoder(tiny.write_folder(tmp_path / "m", family)) as encoder:
        vectors = encoder.embed(IDS).vectors
    assert vectors.shape == (len(IDS), tiny.HIDDEN)
    for ids, vector in zip(IDS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(family, ids), atol=TOLERANCE)


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_a_text_has_one_embedding_whatever_is_beside_it(family: str, tmp_path: Path) -> None:
    with load_encoder(tiny.write_folder(tmp_path / "m", family)) as encoder:
        together = encoder.embed(IDS).vectors
        alone = np.concatenate([encoder.embed([ids]).vectors for ids in IDS])
    np.testing.assert_allclose(together, alone, atol=1e-6)


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "bert"])
def test_long_texts_are_attended_block_by_block(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "BLOCK", 7)
    with load_encoder(tiny.write_folder(tmp_path / "m", family)) as encoder:
        vectors = encoder.embed(IDS).vectors
    for ids, vector in zip(IDS, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(family, ids), atol=TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert"])
def test_a_cross_encoder_scores_pairs_from_0_to_1(family: str, tmp_path: Path) -> None:
    documents = ["paris is the capital of france", "banana", "", "the dog"]
    with load_encoder(tiny.write_folder(tmp_path / "m", family, scores=True)) as encoder:
        assert (encoder.kind, encoder.dimensions, encoder.info.makes) == ("reranker", 0, "scores")
        scores = encoder.rerank("what is the capital of france", documents)
    tensors = float64(tiny.weights(tiny.CONFIGS[family], scores=True))
    own = tiny.tokenizer()
    for document, score, count in zip(documents, scores, scores.token_counts, strict=True):
        pair = own.encode("what is the capital of france", document)
        types = pair.type_ids if tiny.CONFIGS[family].get("type_vocab_size") == 2 else [0] * len(pair.ids)
        assert score == pytest.approx(reference.score(tiny.CONFIGS[family], tensors, pair.ids, types), abs=2e-6)
        assert count == len(pair.ids)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_half_precision_are_computed_with_in_float32(dtype: str, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    half = {
        name: mx.array(tensor).astype(getattr(mx, dtype)) for name, tensor in tiny.weights(tiny.CONFIGS["bert"]).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), half)
    stored = {name: np.array(tensor.astype(mx.float32)) for name, tensor in half.items()}
    with load_encoder(folder) as encoder:
        vectors = encoder.embed(IDS).vectors
        assert encoder.info.dtype == "float32"
    for ids, vector in zip(IDS, vectors, strict=True):
        hidden = reference.hidden_states(tiny.CONFIGS["bert"], float64(stored), ids)
        np.testing.assert_allclose(vector, hidden.mean(0), atol=TOLERANCE)


def test_mlx_s_packed_weights_are_read(tmp_path: Path) -> None:
    plain = tiny.weights(tiny.CONFIGS["bert"])
    packed: dict[str, mx.array] = {}
    rounded = dict(plain)
    for name, tensor in plain.items():
        if name.endswith(".weight") and tensor.ndim == 2 and "encoder.layer" in name and tensor.shape[1] % 32 == 0:
            words, scales, biases = mx.quantize(mx.array(tensor), group_size=32, bits=8)
            stem = name.removesuffix(".weight")
            packed |= {name: words, f"{stem}.scales": scales, f"{stem}.biases": biases}
            rounded[name] = np.array(mx.dequantize(words, scales, biases, group_size=32, bits=8))
        else:
            packed[name] = mx.array(tensor)
    folder = tiny.write_folder(tmp_path / "m", quantization={"group_size": 32, "bits": 8})
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    with load_encoder(folder) as encoder:
        assert encoder.info.quantization.startswith("affine 8-bit, group 32")
        vectors = encoder.embed(IDS).vectors
    for ids, vector in zip(IDS, vectors, strict=True):
        hidden = reference.hidden_states(tiny.CONFIGS["bert"], float64(rounded), ids)
        np.testing.assert_allclose(vector, hidden.mean(0), atol=5e-5)


def test_old_names_of_norms_prefixes_and_unused_heads_are_understood(tmp_path: Path) -> None:
    tensors = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tiny.weights(tiny.CONFIGS["bert"]).items()
    }
    tensors["cls.predictions.bias"] = np.zeros(tiny.VOCAB, np.float32)
    tensors["bert.embeddings.position_ids"] = np.arange(tiny.POSITIONS)[None]
    with load_encoder(tiny.write_folder(tmp_path / "m", tensors=tensors)) as encoder:
        np.testing.assert_allclose(encoder.embed(IDS[3:4]).vectors[0], expected("bert", IDS[3]), atol=TOLERANCE)


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    tensors = list(tiny.weights(tiny.CONFIGS["bert"]).items())
    save_file(dict(tensors[:9]), folder / "model-00001-of-00002.safetensors")
    save_file(dict(tensors[9:]), folder / "model-00002-of-00002.safetensors")
    with load_encoder(folder) as encoder:
        np.testing.assert_allclose(encoder.embed(IDS[3:4]).vectors[0], expected("bert", IDS[3]), atol=TOLERANCE)


def test_every_bad_tensor_is_named_at_once(tmp_path: Path) -> None:
    tensors = tiny.weights(tiny.CONFIGS["bert"])
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["encoder.layer.0.intermediate.dense.weight"] = np.zeros((tiny.WIDE, tiny.HIDDEN + 1), np.float32)
    with pytest.raises(ModelFileError, match=r"layers.1.mlp.down_proj.bias is missing.*up_proj.weight is \(48, 33\)"):
        load_encoder(tiny.write_folder(tmp_path / "m", tensors=tensors))


def test_an_unknown_tensor_is_an_error(tmp_path: Path) -> None:
    tensors = tiny.weights(tiny.CONFIGS["bert"]) | {"encoder.adapter.weight": np.zeros(3, np.float32)}
    with pytest.raises(ModelFileError, match=r"no place for: encoder.adapter.weight"):
        load_encoder(tiny.write_folder(tmp_path / "m", tensors=tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1e\\+09"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": 33}, "4 heads don't divide"),
        ({"hidden_size": 10**12}, "hidden_size is 10"),
        ({"vocab_size": 41}, "words.weight is"),
        ({"layer_norm_eps": "0"}, "layer_norm_eps is '0'"),
        ({"layer_norm_eps": 1e999}, "layer_norm_eps is inf"),
    ],
)
def test_nonsense_in_a_config_is_an_error_that_names_it(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_encoder(tiny.write_folder(tmp_path / "m", **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {"hidden_act": "mish"}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("bert", {"is_decoder": True}),
        ("bert", {"quantization_config": {"quant_method": "gptq"}}),
        ("nomic_bert", {"prenorm": True}),
        ("nomic_bert", {"rotary_scaling_factor": 2.0}),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
    ],
)
def test_what_isnt_supported_is_said(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        load_encoder(tiny.write_folder(tmp_path / "m", family, **changes))


def test_a_classifier_of_several_labels_is_no_reranker(tmp_path: Path) -> None:
    tensors = tiny.weights(tiny.CONFIGS["bert"], scores=True)
    tensors |= {"classifier.weight": np.zeros((3, tiny.HIDDEN), np.float32), "classifier.bias": np.zeros(3, np.float32)}
    with pytest.raises(UnsupportedModelError, match="3 labels"):
        load_encoder(tiny.write_folder(tmp_path / "m", scores=True, tensors=tensors))


def test_a_tokenizer_with_ids_beyond_the_embeddings_reads_nothing_there(tmp_path: Path) -> None:
    tensors = tiny.weights(tiny.CONFIGS["bert"])
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][:6]
    with load_encoder(tiny.write_folder(tmp_path / "m", tensors=tensors, vocab_size=6)) as encoder:
        assert encoder.embed(["the quick"]).vectors.shape == (1, tiny.HIDDEN)
        with pytest.raises(UnsupportedModelError, match="beyond its 6 embeddings"):
            encoder.embed(["paris"])
