"""What is refused before a download: models that write no text, and models that won't fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer import runtime, zoo
from mlxinfer.cli import checks
from mlxinfer.config import Settings, load_settings
from mlxinfer.errors import OfflineError, WontFitError
from mlxinfer.zoo.files import ModelFiles
from tests.unit.cli.conftest import Invoke, error_of
from tests.unit.encoders import tiny as encoder_tiny

if TYPE_CHECKING:
    from pathlib import Path

EMBEDDING = [e for e in zoo.catalog() if checks.no_text(e)]
LARGE = max(zoo.catalog(), key=lambda e: e.size_bytes)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would have been downloaded; nothing is on this machine."""
    names: list[str] = []

    def resolve(name: str, settings: object, *, fetch: bool = True, **_: Any) -> ModelFiles:
        if fetch:
            names.append(name)
        raise OfflineError(f"{name} is not on this machine")

    monkeypatch.setattr(zoo, "resolve", resolve)
    monkeypatch.setattr(runtime, "memory", lambda: runtime.Memory(16 * 10**9, 12 * 10**9, 12 * 10**9))
    monkeypatch.setenv("MLXINFER_PORT", "0")
    return names


@pytest.mark.parametrize("name", [EMBEDDING[0].alias, *[e.hub for e in EMBEDDING if e.hub][:1]])
@pytest.mark.parametrize("command", [("run", "{}", "Hi"), ("run", "-m", "{}", "Hi")])
def test_an_embedding_model_is_refused_before_the_download(
    invoke: Invoke, fetched: list[str], name: str, command: tuple[str, ...]
) -> None:
    result = invoke(*(word.format(name) for word in command))
    assert result.exit_code == 1
    assert f"{name} is an embedding model and writes no text" in result.stderr
    assert fetched == []


@pytest.mark.parametrize("name", ["smollm2-135m", "org/unknown", "./folder"])
def test_other_models_are_not_taken_for_embedding_models(name: str) -> None:
    checks.check_generates(name)


@pytest.mark.parametrize("name", [LARGE.alias, LARGE.alias.upper(), LARGE.hub or "", f"{LARGE.hub}@main"])
@pytest.mark.parametrize("verb", ["run", "serve"])
def test_a_model_too_large_ends_with_4_before_the_download(
    invoke: Invoke, fetched: list[str], name: str, verb: str
) -> None:
    result = invoke(verb, name, *(["Hi"] if verb == "run" else []), "--json")
    assert (result.exit_code, error_of(result)["code"]) == (4, "wont_fit")
    assert "this machine gives 12.0 GB" in error_of(result)["message"]
    assert fetched == []


def test_a_shorter_context_can_make_a_model_fit(fetched: list[str]) -> None:
    room = zoo.fit("qwen3-8b", Settings(), context=64, bandwidth=(1.0, "x"), on_cpu=False).total_bytes
    tight = runtime.Memory(room, room, room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "memory", lambda: tight)
        patch.setattr(runtime, "on_cpu", lambda: False)
        with pytest.raises(WontFitError, match=r"--ctx \d+"):
            checks.check_fits("qwen3-8b", Settings())
        checks.check_fits("qwen3-8b", load_settings({"context_length": 64}))


def test_a_model_that_is_here_is_left_to_the_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = ModelFiles(LARGE.alias, "folder", tmp_path, "hub cache", 1)
    monkeypatch.setattr(zoo, "resolve", lambda name, settings, **_: here)
    monkeypatch.setattr(runtime, "memory", lambda: runtime.Memory(10**9, 10**9, 10**9))
    checks.check_fits(LARGE.alias, Settings())


def test_pull_warns_of_a_model_too_large_and_goes_on(
    invoke: Invoke, fetched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = ModelFiles(LARGE.alias, "folder", tmp_path, "hub cache", 1)
    monkeypatch.setattr(zoo, "pull", lambda name, settings, progress: files)
    result = invoke("pull", LARGE.alias)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}\n")
    assert f"Warning: {LARGE.alias} needs" in result.stderr


def test_pull_show_and_fit_of_an_embedding_model_advise_no_run(
    invoke: Invoke, fetched: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = EMBEDDING[0].alias
    monkeypatch.setattr(zoo, "pull", lambda *_, **__: ModelFiles(name, "folder", tmp_path, "hub cache", 1))
    monkeypatch.setattr("mlxinfer.zoo.fitting.measured_bandwidth", lambda: (100.0, "Apple M9, published"))
    for verb in ("pull", "show", "fit"):
        result = invoke(verb, name)
        assert result.exit_code == 0
        assert "an embedding model and writes no text" in result.stderr
        assert "mlxinfer run" not in result.stdout + result.stderr
    assert json.loads(invoke("show", name, "--json").stdout)["catalog"]["capabilities"] == ["embedding"]


def test_an_embedding_model_is_served(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def serve(pool: Any, **_: Any) -> None:
        with pool.acquire("e") as lease:
            seen.append(lease.encoder.info.makes)

    monkeypatch.setattr("mlxinfer.server.run.serve", serve)
    folder = encoder_tiny.write_folder(tmp_path / "m")
    assert invoke("serve", f"e={folder}", "--port", "0").exit_code == 0
    assert seen == ["embeddings"]
