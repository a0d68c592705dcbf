"""What a name means, and which names are refused before anything looks at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer import zoo
from mlxinfer.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.zoo.names import parse_name
from tests.unit.zoo.models import write_model

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.config import Settings


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("./folder", "path"),
        ("../folder", "path"),
        ("/models/folder", "path"),
        ("~/folder", "path"),
        (".", "path"),
        ("model.gguf", "path"),
        ("some/dir/model.GGUF", "path"),
        ("smollm2-135m", "alias"),
        ("SmolLM2-135M", "alias"),
        ("org/name", "hub"),
        ("org/name@v1.0", "hub"),
        ("org/name@refs/pr/1", "hub"),
        ("org/name:Q4_K_M", "hub"),
        ("org/name@main:model-Q4_K_M.gguf", "hub"),
        ("ollama:llama3.2:1b", "store"),
        ("llama.cpp:org_name_file.gguf", "store"),
        ("nothing-of-this-name", "unknown"),
        ("org/name/more", "unknown"),
        ("org/..", "unknown"),
        ("org/name@../../x", "unknown"),
        ("org/name@a/../../x", "unknown"),
        ("org/name:a/../../x", "unknown"),
        ("org/na me", "unknown"),
        ("https://huggingface.co/org/name", "unknown"),
    ],
)
def test_a_name_has_one_meaning(text: str, kind: str) -> None:
    assert parse_name(text).kind == kind


def test_a_hub_name_is_taken_apart() -> None:
    name = parse_name("org/name@v1.0:model-Q8_0.gguf")
    assert (name.repo, name.revision, name.file) == ("org/name", "v1.0", "model-Q8_0.gguf")
    assert parse_name("org/name").revision == "main"


@pytest.mark.parametrize("text", ["", "   ", "a\0b", "a\nb", "org/na\x7fme", "x" * 513, "ollama:../../etc/passwd",
                                  "llama.cpp:/etc/passwd.gguf", "ollama:a/../../b:latest", "a\ud800b"])  # fmt: skip
def test_names_that_can_be_no_model_are_refused(text: str) -> None:
    with pytest.raises(ModelNotFoundError):
        parse_name(text)


def test_an_alias_wins_over_a_folder_and_dot_slash_names_the_folder(tmp_path: Path, settings: Settings) -> None:
    write_model(tmp_path / "smollm2-135m")
    assert parse_name("smollm2-135m").kind == "alias"
    assert zoo.resolve("./smollm2-135m", settings).origin == "folder"


def test_a_model_folder_wins_over_a_hub_id_of_the_same_name(tmp_path: Path, settings: Settings) -> None:
    write_model(tmp_path / "org" / "name")
    assert zoo.resolve("org/name", settings).origin == "folder"


def test_a_folder_and_a_gguf_file_resolve_to_themselves(tmp_path: Path, settings: Settings) -> None:
    folder = write_model(tmp_path / "m")
    found = zoo.resolve(str(folder), settings)
    assert (found.kind, found.path, found.size_bytes) == (
        "folder",
        folder,
        (folder / "model.safetensors").stat().st_size,
    )
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert zoo.resolve("x.gguf", settings).kind == "gguf"


def test_a_folder_with_one_gguf_is_that_file_and_with_two_asks_which(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert zoo.resolve(str(tmp_path), settings).path.name == "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        zoo.resolve(str(tmp_path), settings)


def test_paths_that_are_no_model_say_what_is_missing(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match="no model at"):
        zoo.resolve(str(tmp_path / "absent"), settings)
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        zoo.resolve(str(tmp_path), settings)
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="not all of its weights"):
        zoo.resolve(str(folder), settings)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModelError):
        zoo.resolve(str(tmp_path / "notes.txt"), settings)


def test_an_unknown_name_suggests_what_comes_close(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean qwen3-8b"):
        zoo.resolve("qwen3-8", settings)
    with pytest.raises(ModelNotFoundError, match="mlxinfer ls"):
        zoo.resolve("zzzzzzzzzzzz", settings)


def test_importing_the_zoo_loads_neither_mlx_nor_the_hub_client() -> None:
    import subprocess
    import sys

    code = "import mlxinfer.zoo, sys; print([m for m in ('mlx.core', 'huggingface_hub', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["~nosuchuser/x", "~nosuchuser", "~nosuchuser/m.gguf", "a" * 300, "./" + "a" * 300])
def test_a_home_that_is_not_there_or_a_name_too_long_for_a_file_is_not_found(settings: Settings, name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        zoo.resolve(name, settings)
    with pytest.raises(ModelNotFoundError):
        zoo.resolve("ollama:" + "a" * 300, settings)
