"""What `show` says comes out of headers and configs, and hostile ones are errors."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from mlxinfer import zoo
from mlxinfer.errors import ModelFileError, ModelNotFoundError
from mlxinfer.formats.safetensors import INDEX_NAME
from tests.unit.formats.odd_files import ODD, put_odd
from tests.unit.zoo.models import write_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.config import Settings


def packed(header: Mapping[str, object], size: int = 64) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def test_a_folder_describes_itself(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m", torch_dtype="bfloat16")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}{% if tools %}"}))
    card = zoo.describe(str(folder), settings)
    assert (card.architecture, card.parameters, card.context_length) == ("llama", 32, 512)
    assert (card.quantization, card.licence) == ("bfloat16", "apache-2.0")
    assert card.capabilities == ("chat", "tools")
    assert ("model.safetensors", card.size_bytes) in card.files
    assert json.loads(json.dumps(card.as_dict()))["architecture"] == "llama"


def test_packed_weights_count_as_the_parameters_they_hold(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m", quantization={"bits": 4, "group_size": 64})
    header = {
        "a.weight": {"dtype": "U32", "shape": [8, 16], "data_offsets": [0, 512]},
        "a.scales": {"dtype": "BF16", "shape": [8, 2], "data_offsets": [512, 544]},
        "a.biases": {"dtype": "BF16", "shape": [8, 2], "data_offsets": [544, 576]},
        "norm.weight": {"dtype": "BF16", "shape": [128], "data_offsets": [576, 832]},
    }
    (folder / "model.safetensors").write_bytes(packed(header, 832))
    card = zoo.describe(str(folder), settings)
    assert card.parameters == 8 * 128 + 128
    assert card.quantization == "affine 4-bit, group 64"


def test_a_sentence_transformer_is_an_embedding_model(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "modules.json").write_text("[]")
    assert zoo.describe(str(folder), settings).capabilities == ("embedding",)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 16, struct.pack("<Q", 2**40), packed({})[:9], struct.pack("<Q", 2) + b"[]"]
)
def test_a_hostile_safetensors_header_is_an_error(tmp_path: Path, settings: Settings, data: bytes) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        zoo.describe(str(folder), settings)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\udcff"])
def test_a_hostile_config_is_an_error(tmp_path: Path, settings: Settings, text: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelFileError, match=r"config\.json"):
        zoo.describe(str(folder), settings)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors", INDEX_NAME])
def test_what_is_no_regular_file_in_a_folder_is_an_error(
    tmp_path: Path, settings: Settings, kind: str, name: str
) -> None:
    folder = write_model(tmp_path / "m")
    put_odd(folder / name, kind)
    with pytest.raises(ModelFileError):
        zoo.describe(str(folder), settings)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
def test_a_readme_that_is_no_regular_file_states_no_licence(tmp_path: Path, settings: Settings, kind: str) -> None:
    folder = write_model(tmp_path / "m")
    put_odd(folder / "README.md", kind)
    assert zoo.describe(str(folder), settings).licence == ""


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
def test_a_gguf_that_is_no_regular_file_is_no_model(tmp_path: Path, settings: Settings, kind: str) -> None:
    path = put_odd(tmp_path / "m.gguf", kind)
    with pytest.raises((ModelNotFoundError, ModelFileError), match=r"m\.gguf"):
        zoo.describe(str(path), settings)
    put_odd(tmp_path / "folder" / "m.gguf", kind)
    with pytest.raises(ModelFileError, match="no model folder"):
        zoo.describe(str(tmp_path / "folder"), settings)


def test_a_licence_with_control_characters_is_not_shown(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m", model_type="\x1b[2Jllama")
    (folder / "README.md").write_text("---\nlicense: \x1b[31mmit\n---\n")
    card = zoo.describe(str(folder), settings)
    assert (card.licence, card.architecture) == ("", "")
