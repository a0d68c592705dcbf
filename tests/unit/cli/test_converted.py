"""What is converted into the cache before it is loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import mlxinfer
from mlxinfer.cli import converted
from mlxinfer.config import Settings
from mlxinfer.zoo import resolve
from tests import tiny
from tests.unit.convert.sources import test_gptq
from tests.unit.convert.sources.checkpoints import write_safetensors
from tests.unit.convert.test_published_kinds import gptq

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.convert.sources.base import Logical
    from tests.unit.convert.sources.checkpoints import Tensors


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A tiny model whose matrices are GPTQ's."""
    from mlxinfer.convert import open_source

    folder = tiny.write_folder(tmp_path / "model", intermediate_size=128)
    source = open_source(folder)
    rng = np.random.default_rng(3)
    tensors: Tensors = {}
    for name, logical in source.tensors.items():
        tensors |= _stored(name, logical, source.read(name), rng)
    source.close()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_safetensors(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = test_gptq.settings("gptq", 4, 32)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _stored(name: str, logical: Logical, values: np.ndarray, rng: np.random.Generator) -> Tensors:
    if not name.endswith("_proj.weight"):
        return {name: ("F32", values.astype(np.float32))}
    parts, _ = gptq(rng, logical.shape)
    return {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}


def test_what_mlx_lm_does_not_read_is_converted_once_and_runs(quantized: Path, tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    files = resolve(str(quantized), settings)
    first = converted.loadable(files, settings)
    assert first.path.parent == tmp_path / "cache" / "converted"
    assert (first.name, first.origin) == (files.name, files.origin)
    before = (first.path / "config.json").stat().st_mtime_ns
    assert converted.loadable(files, settings) == first
    assert (first.path / "config.json").stat().st_mtime_ns == before, "once is enough"
    with mlxinfer.load(str(quantized), settings=settings, files=first) as llm:
        assert llm.info.name == str(quantized)
        assert llm.info.quantization.startswith("affine 4-bit")
        assert llm.generate("hello", max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    (quantized / "model.safetensors").touch()
    assert converted.loadable(resolve(str(quantized), settings), settings).path != first.path


def test_what_can_be_loaded_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    files = resolve(str(tiny.write_folder(tmp_path / "plain")), settings)
    assert converted.loadable(files, settings) is files
    from tests.unit.formats.gguf_files import tiny_model

    gguf = resolve(str(tiny_model().write(tmp_path / "m.gguf")), settings)
    assert converted.loadable(gguf, settings) is gguf
    monkeypatch.setattr(converted, "GGUF_BYTES", 1000)
    assert converted.loadable(gguf, settings).kind == "folder", "a large one is laid out once"
