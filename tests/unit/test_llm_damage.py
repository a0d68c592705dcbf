"""Loading folders that are damaged: the file is named, and the next load works."""

import json

import pytest

import mlxinfer
from mlxinfer import ModelFileError, UnsupportedModelError
from mlxinfer.llm import LLM
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")


def break_config(folder):
    (folder / "config.json").write_text("{ not json")


def remove_config(folder):
    (folder / "config.json").unlink()


def unknown_architecture(folder):
    (folder / "config.json").write_text(json.dumps(tiny.config(model_type="no_such_model")))


def truncate_weights(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (break_config, ModelFileError, "config.json"),
        (remove_config, mlxinfer.MlxinferError, "config.json"),
        (unknown_architecture, UnsupportedModelError, "no_such_model"),
        (truncate_weights, ModelFileError, "model.safetensors"),
        (remove_tokenizer, ModelFileError, "tokenizer"),
        (remove_weights, mlxinfer.MlxinferError, "safetensors"),
    ],
)
def test_a_damaged_folder_is_a_clear_error_and_the_next_load_works(tmp_path, folder, damage, error, named):
    broken = tiny.write_folder(tmp_path / "broken")
    damage(broken)
    with pytest.raises(error, match=named):
        mlxinfer.load(str(broken))
    with mlxinfer.load(str(folder)) as llm:
        assert isinstance(llm, LLM)
        assert llm.generate("a", temperature=0, max_tokens=5)
