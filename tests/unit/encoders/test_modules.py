"""What sentence-transformers' files say is done; what makes no sense there is an error that names the file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlxinfer.encoders import load_encoder
from mlxinfer.encoders.modules import MODES, read_recipe
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from tests.unit.encoders import reference, tiny

if TYPE_CHECKING:
    from pathlib import Path

IDS = [[2, 5, 6, 7, 3], [2, 3], [2, *range(4, 20), 3]]
MEAN = {"word_embedding_dimension": tiny.HIDDEN, "pooling_mode_mean_tokens": True}


def hidden(ids: list[int]) -> Any:
    tensors = {name: tensor.astype(np.float64) for name, tensor in tiny.weights(tiny.CONFIGS["bert"]).items()}
    return reference.hidden_states(tiny.CONFIGS["bert"], tensors, ids)


@pytest.mark.parametrize(("mode", "key"), MODES.items())
@pytest.mark.parametrize("written", ["flags", "mode"])
def test_each_way_of_pooling(mode: str, key: str, written: str, tmp_path: Path) -> None:
    pooling = {key: True} if written == "flags" else {"pooling_mode": mode}
    with load_encoder(tiny.write_folder(tmp_path / "m", pooling=pooling, extra=())) as encoder:
        for ids, vector in zip(IDS, encoder.embed(IDS).vectors, strict=True):
            np.testing.assert_allclose(vector, reference.pooled(hidden(ids), mode), atol=1e-5)


def test_several_ways_of_pooling_stand_side_by_side(tmp_path: Path) -> None:
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    with load_encoder(tiny.write_folder(tmp_path / "m", pooling=pooling)) as encoder:
        assert encoder.dimensions == 2 * tiny.HIDDEN
        wanted = np.concatenate([reference.pooled(hidden(IDS[0]), mode) for mode in ("cls", "mean")])
        np.testing.assert_allclose(encoder.embed(IDS[:1]).vectors[0], reference.unit(wanted), atol=5e-6)


def dense_folder(folder: Path, **changes: Any) -> tuple[Path, Any, Any]:
    tiny.write_folder(folder, pooling=MEAN, extra=("Dense", "Normalize"))
    (folder / "2_Dense").mkdir()
    config = {"in_features": tiny.HIDDEN, "out_features": 6, "bias": True,
              "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (folder / "2_Dense" / "config.json").write_text(json.dumps(config | changes))
    rng = np.random.default_rng(3)
    matrix, bias = rng.normal(size=(6, tiny.HIDDEN)).astype(np.float32), rng.normal(size=6).astype(np.float32)
    save_file({"linear.weight": matrix, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    return folder, matrix.astype(np.float64), bias.astype(np.float64)


def test_a_dense_layer_follows_the_pooling(tmp_path: Path) -> None:
    folder, matrix, bias = dense_folder(tmp_path / "m")
    with load_encoder(folder) as encoder:
        assert encoder.dimensions == 6
        wanted = reference.unit(np.tanh(matrix @ hidden(IDS[0]).mean(0) + bias))
        np.testing.assert_allclose(encoder.embed(IDS[:1]).vectors[0], wanted, atol=5e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 31}, "in_features is 31, but 32 come in"),
        ({"out_features": 7}, r"weight is \(6, 32\), not \(7, 32\)"),
        ({"out_features": 10**9}, "out_features is 1000000000"),
        ({"bias": False}, "bias has no place"),
    ],
)
def test_a_dense_layer_that_does_not_fit_is_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        load_encoder(dense_folder(tmp_path / "m", **changes)[0])


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    folder = dense_folder(tmp_path / "m")[0]
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"2_Dense/model.safetensors is missing"):
        load_encoder(folder)


def test_the_smallest_limit_of_tokens_holds(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", pooling=MEAN)
    with load_encoder(folder) as encoder:
        assert encoder.info.context_length == tiny.POSITIONS
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 50}))
    with load_encoder(folder) as encoder:
        assert encoder.info.context_length == 50
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    with load_encoder(folder) as encoder:
        assert encoder.info.context_length == 20
    with load_encoder(folder, context_length=10) as encoder:
        assert encoder.info.context_length == 10


def test_prompts_and_the_default_one(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "m", pooling=MEAN)
    prompts = {"prompts": {"query": "what is ", "document": ""}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with load_encoder(folder) as encoder:
        assert np.array_equal(
            encoder.embed(["paris"]).vectors, encoder.embed(["what is paris"], prompt="document").vectors
        )
        with pytest.raises(ValueError, match=r"the prompts of .* are: query, document"):
            encoder.embed(["paris"], prompt="other")


@pytest.mark.parametrize(
    "modules",
    [
        "{", "[]", "{}", "[1, 2]", "[" * 100_000,
        [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../1_Pooling"}],
        [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "/etc"}],
        [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": 5}],
        [{"type": "x.Transformer", "path": ""}, {"path": "1_Pooling"}],
        [{"type": "x.Transformer", "path": ""}] * 9,
    ],
)  # fmt: skip
def test_nonsense_in_modules_json_is_an_error(modules: Any, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    with pytest.raises(ModelFileError, match=r"modules\.json"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    "kinds", [["Pooling", "Transformer"], ["WordEmbeddings", "Pooling"], ["Transformer", "Pooling", "LSTM"]]
)
def test_parts_that_are_not_known_are_named(kinds: list[str], tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, pooling=MEAN)
    modules = [{"type": f"x.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match=r"modules\.json"):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    "pooling",
    [
        {}, {"pooling_mode_mean_tokens": False}, {"pooling_mode_mean_tokens": "yes"}, {"pooling_mode": "best"},
        {"pooling_mode": []}, {"pooling_mode": 7}, {"pooling_mode": ["mean", "mean"]},
    ],
)  # fmt: skip
def test_nonsense_in_a_pooling_config_is_an_error(pooling: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="1_Pooling"):
        read_recipe(tiny.write_folder(tmp_path, pooling=pooling))


@pytest.mark.parametrize(
    "config", [{"prompts": ["a"]}, {"prompts": {"a": 5}}, {"prompts": {"a": "x" * 5000}}, {"default_prompt_name": "a"}]
)
def test_nonsense_among_the_prompts_is_an_error(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match="config_sentence_transformers"):
        read_recipe(tmp_path)
