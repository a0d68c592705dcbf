"""Every test of the zoo gets an empty home: the real one is neither read nor written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.config import Settings
from tests.unit.zoo.fake_hub import FakeHub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_ENDPOINT", "HF_TOKEN",
                 "OLLAMA_MODELS", "LLAMA_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr("mlxinfer.zoo.blobs.BACKOFF_S", 0.01)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()
