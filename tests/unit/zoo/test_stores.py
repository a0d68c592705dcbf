"""Models that other programs downloaded are found where they lie, and left alone."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer import zoo
from mlxinfer.errors import InvalidRequestError, ModelNotFoundError, OfflineError
from mlxinfer.zoo.stores import hub_cache, llama_cpp_root, ollama_roots
from tests.unit.formats.odd_files import ODD, put_odd
from tests.unit.zoo.models import safetensors, write_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlxinfer.config import Settings

GGUF = b"GGUF" + bytes(60)


def ollama_model(root: Path, name: str, data: bytes = GGUF, **changes: Any) -> Path:
    """Write a manifest (registry/namespace/model/tag) and its blob; `changes` go into the model layer."""
    digest = hashlib.sha256(data).hexdigest()
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)}
    template = {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "1" * 64, "size": 3}
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": [template, layer | changes]}))
    return blob


def test_ollama_models_are_found_by_their_own_names(home: Path, settings: Settings) -> None:
    root = home / ".ollama" / "models"
    blob = ollama_model(root, "registry.ollama.ai/library/llama3.2/1b")
    ollama_model(root, "registry.ollama.ai/someone/model/latest", b"GGUF-2")
    ollama_model(root, "hf.co/org/repo/Q4_K_M", b"GGUF-3")
    names = [m.name for m in zoo.installed(settings)]
    assert names == ["ollama:hf.co/org/repo:Q4_K_M", "ollama:llama3.2:1b", "ollama:someone/model:latest"]
    for name in names:
        assert zoo.resolve(name, settings, fetch=False).name == name
    assert zoo.resolve("ollama:llama3.2:1b", settings).path == blob
    assert zoo.resolve("ollama:someone/model", settings).size_bytes == 6


def test_ollama_models_elsewhere_are_found_through_their_variable(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "store"))
    ollama_model(tmp_path / "store", "registry.ollama.ai/library/m/latest")
    assert zoo.resolve("ollama:m", settings).origin == "ollama"


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha256:../../../../etc/passwd"},
        {"digest": "sha256:" + "Z" * 64},
        {"digest": 5},
        {"size": 5},
        {"mediaType": "application/vnd.ollama.image.adapter"},
    ],
)
def test_an_ollama_manifest_that_does_not_match_its_blob_is_no_model(
    home: Path, settings: Settings, changes: dict[str, Any]
) -> None:
    ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/m/latest", **changes)
    assert zoo.installed(settings) == []


def test_an_ollama_blob_without_a_sha256_name_is_no_model(home: Path, settings: Settings) -> None:
    blob = ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/m/latest", digest="sha256:abc")
    blob.with_name("sha256-abc").write_bytes(GGUF)
    assert zoo.installed(settings) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 3}', '{"layers": [7]}', "\0\1", "[" * 100_000])
def test_a_broken_ollama_manifest_is_skipped(home: Path, settings: Settings, text: str) -> None:
    ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/good/latest")
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(text)
    assert [m.name for m in zoo.installed(settings)] == ["ollama:good:latest"]


def test_an_ollama_blob_that_links_out_of_the_store_is_no_model(home: Path, settings: Settings, tmp_path: Path) -> None:
    blob = ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/m/latest")
    (tmp_path / "secret").write_bytes(GGUF)
    blob.unlink()
    blob.symlink_to(tmp_path / "secret")
    assert zoo.installed(settings) == []


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models", "elsewhere/models"])
def test_lm_studio_models_answer_to_their_hub_names(home: Path, settings: Settings, root: str) -> None:
    (home / ".lmstudio-home-pointer").write_text(str(home / "elsewhere"))
    write_model(home / root / "mlx-community" / "Tiny-4bit")
    gguf = home / root / "someone" / "Tiny-GGUF" / "Tiny-Q4_0.gguf"
    gguf.parent.mkdir(parents=True)
    gguf.write_bytes(GGUF)
    assert zoo.resolve("mlx-community/Tiny-4bit", settings).origin == "lm studio"
    assert zoo.resolve("someone/Tiny-GGUF", settings).path == gguf
    assert [m.name for m in zoo.installed(settings)] == [
        "mlx-community/Tiny-4bit",
        "someone/Tiny-GGUF:Tiny-Q4_0.gguf",
    ]


def test_llama_cpp_files_answer_to_their_hub_names_and_their_own(
    home: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / "llama"))
    file = home / "llama" / "org_tiny-GGUF_tiny-Q8_0.gguf"
    file.parent.mkdir()
    file.write_bytes(GGUF)
    assert zoo.resolve("org/tiny-GGUF", settings, fetch=False).path == file
    assert zoo.resolve("org/tiny-GGUF:Q8_0", settings, fetch=False).path == file
    assert zoo.resolve(f"llama.cpp:{file.name}", settings).path == file
    with pytest.raises(OfflineError):
        zoo.resolve("org/tiny-GGUF:Q4_0", settings, fetch=False)


@pytest.mark.parametrize(
    ("variable", "value", "where"),
    [
        ("HF_HUB_CACHE", "{home}/hubcache", "hubcache"),
        ("HUGGINGFACE_HUB_CACHE", "{home}/old", "old"),
        ("HF_HOME", "~/hf", "hf/hub"),
        ("XDG_CACHE_HOME", "{home}/xdg", "xdg/huggingface/hub"),
    ],
)
def test_the_hub_cache_is_where_the_hub_client_puts_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, where: str
) -> None:
    assert hub_cache() == home / ".cache/huggingface/hub"
    monkeypatch.setenv(variable, value.format(home=home))
    assert hub_cache() == home / where


def cached_model(home: Path, repo: str = "org/tiny", revision: str = "main") -> Path:
    folder = home / ".cache/huggingface/hub" / f"models--{repo.replace('/', '--')}"
    snapshot = write_model(folder / "snapshots" / ("c" * 40))
    (folder / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text("c" * 40)
    return snapshot


def test_what_another_program_put_into_the_hub_cache_is_found(home: Path, settings: Settings) -> None:
    snapshot = cached_model(home)
    cached_model(home, "org/other", "refs/pr/7")
    assert zoo.resolve("org/tiny", settings).path == snapshot
    assert zoo.resolve("org/other@refs/pr/7", settings, fetch=False).name == "org/other@refs/pr/7"
    assert [m.name for m in zoo.installed(settings)] == ["org/other@refs/pr/7", "org/tiny"]


@pytest.mark.parametrize("ref", ["", "../../..", "c" * 39, "\xff"])
def test_a_ref_that_is_no_commit_is_not_followed(home: Path, settings: Settings, ref: str) -> None:
    cached_model(home)
    (home / ".cache/huggingface/hub/models--org--tiny/refs/main").write_text(ref)
    assert zoo.installed(settings) == []


def test_the_index_wins_over_what_else_lies_in_the_folder(home: Path, settings: Settings) -> None:
    snapshot = cached_model(home)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part1.safetensors"}}))
    assert zoo.installed(settings) == []
    (snapshot / "part1.safetensors").write_bytes(safetensors(a=(2, 2)))
    assert zoo.installed(settings)[0].size_bytes == (snapshot / "part1.safetensors").stat().st_size


@pytest.mark.parametrize("weight_map", [{"a": "../../../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": 5}, {}, []])
def test_an_index_that_points_elsewhere_makes_no_model(home: Path, settings: Settings, weight_map: Any) -> None:
    snapshot = cached_model(home)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert zoo.installed(settings) == []


def test_files_of_other_programs_and_of_the_user_are_not_deleted(
    home: Path, settings: Settings, tmp_path: Path
) -> None:
    blob = ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/m/latest")
    studio = write_model(home / ".lmstudio/models/org/studio")
    mine = write_model(tmp_path / "mine")
    for name, owner in [("ollama:m:latest", "ollama rm"), ("org/studio", "LM Studio"), (str(mine), "your own")]:
        with pytest.raises(InvalidRequestError, match=owner):
            zoo.remove(name, settings)
    assert blob.exists()
    assert studio.exists()
    assert mine.exists()
    with pytest.raises(ModelNotFoundError):
        zoo.remove("org/never-there", settings)


def test_offline_a_missing_model_is_answered_with_what_is_there(home: Path, settings: Settings) -> None:
    ollama_model(home / ".ollama" / "models", "registry.ollama.ai/library/qwen3/8b")
    with pytest.raises(OfflineError, match="ollama:qwen3:8b"):
        zoo.resolve("qwen3-8b", settings, fetch=False)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "place",
    [
        ".ollama/models/manifests/registry.ollama.ai/library/odd/latest",
        ".ollama/models/blobs/sha256-" + hashlib.sha256(b"GGUF-odd").hexdigest(),
        ".cache/huggingface/hub/models--org--odd/refs/main",
        ".cache/huggingface/hub/models--org--odd/snapshots/" + "c" * 40 + "/model.safetensors.index.json",
        ".cache/huggingface/hub/models--org--odd/snapshots/" + "c" * 40 + "/config.json",
        ".cache/llama.cpp/odd.gguf",
        ".lmstudio/models/org/odd/odd.gguf",
        ".lmstudio-home-pointer",
    ],
)
def test_what_is_no_regular_file_in_a_store_is_passed_over(
    home: Path, settings: Settings, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(home / ".cache/llama.cpp"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/good/latest")
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/odd/latest", b"GGUF-odd")
    cached_model(home, "org/odd")
    put_odd(home / place, kind)
    names = {m.name for m in zoo.installed(settings)}
    assert names >= {"ollama:good:latest"}
    assert names <= {"ollama:good:latest", "ollama:odd:latest", "org/odd"}
    with pytest.raises(ModelNotFoundError):
        zoo.resolve("no such model", settings)
    for name in {"ollama:odd", "org/odd"} - names - {n.removesuffix(":latest") for n in names}:
        with pytest.raises((ModelNotFoundError, OfflineError)):
            zoo.resolve(name, settings)


@pytest.mark.parametrize(
    ("variable", "ask"),
    [
        ("HF_HOME", hub_cache),
        ("HF_HUB_CACHE", hub_cache),
        ("XDG_CACHE_HOME", hub_cache),
        ("LLAMA_CACHE", llama_cpp_root),
        ("OLLAMA_MODELS", ollama_roots),
    ],
)
def test_a_variable_with_an_unknown_home_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, ask: Callable[[], object]
) -> None:
    monkeypatch.setenv(variable, "~nosuchuser/x")
    with pytest.raises(InvalidRequestError, match=rf"{variable} is '~nosuchuser/x'"):
        ask()


def test_models_that_the_user_links_into_lm_studio_are_found(home: Path, settings: Settings, tmp_path: Path) -> None:
    write_model(tmp_path / "disk/tiny")
    (tmp_path / "disk/m.gguf").write_bytes(GGUF)
    org = home / ".lmstudio/models/org"
    (org / "one").mkdir(parents=True)
    (org / "one/m.gguf").symlink_to(tmp_path / "disk/m.gguf")
    (org / "tiny").symlink_to(tmp_path / "disk/tiny")
    (org / "gone").symlink_to(tmp_path / "disk/gone")
    assert [m.name for m in zoo.installed(settings)] == ["org/one:m.gguf", "org/tiny"]


def test_the_temporary_name_of_a_ref_is_no_revision(home: Path, settings: Settings) -> None:
    cached_model(home)
    (home / ".cache/huggingface/hub/models--org--tiny/refs/.main.0a1b.tmp").write_text("c" * 40)
    assert [m.name for m in zoo.installed(settings)] == ["org/tiny"]
