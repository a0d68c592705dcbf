"""What is converted into the cache before it is loaded."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

import mlxinfer
from mlxinfer.cli import converted
from mlxinfer.config import Settings
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.zoo import resolve
from mlxinfer.zoo.checks import needs_conversion
from tests import tiny
from tests.unit.convert.sources import test_gptq, test_torch
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


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    """A tiny model whose weights are torch's .bin files alone."""
    folder = tiny.write_folder(tmp_path / "torch model")
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    tensors: dict[str, bytes] = {}
    data: dict[str, bytes] = {}
    for number, (name, array) in enumerate(loaded.items()):
        values = np.array(array.astype(mx.float32))
        strides = tuple(step // 4 for step in values.strides)
        data[str(number)] = values.tobytes()
        tensors[name.replace(".", "__")] = test_torch.tensor(
            test_torch.storage(str(number), values.size), 0, values.shape, strides
        )
    test_torch.archive(folder / "pytorch_model.bin", test_torch.state(**tensors), data)
    return folder


def test_torchs_files_are_converted_once_and_give_the_same_logits(torch_folder: Path, tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    files = resolve(str(torch_folder), settings)
    assert (files.kind, files.size_bytes) == ("folder", (torch_folder / "pytorch_model.bin").stat().st_size)
    usable = converted.loadable(files, settings)
    assert usable.path.parent == tmp_path / "cache" / "converted"
    plain = tiny.write_folder(tmp_path / "plain")
    texts: list[object] = []
    for name, given in ((str(torch_folder), usable), (str(plain), None)):
        with mlxinfer.load(name, settings=settings, files=given) as llm:
            texts.append(llm.generate("hello", max_tokens=8, ignore_eos=True, temperature=0))
    assert texts[0] == texts[1]


def test_what_python_can_not_load_is_answered_with_the_command_that_mends_it(
    torch_folder: Path, quantized: Path, tmp_path: Path
) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    command = f"mlxinfer convert '{torch_folder}' './torch model-mlx'"
    with pytest.raises(UnsupportedModelError, match=re.escape(f"`{command}`")):
        mlxinfer.load(str(torch_folder), settings=settings)
    with pytest.raises((UnsupportedModelError, ModelFileError), match=re.escape(f"`mlxinfer convert {quantized} ./")):
        mlxinfer.load(str(quantized), settings=settings)


def test_a_model_that_serve_loads_later_is_converted_at_its_start(
    torch_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxinfer.cli import serve
    from mlxinfer.pool import Machine, ModelPool

    settings = Settings(cache_dir=tmp_path / "cache")
    machine = Machine(settings)
    pool = ModelPool({"m": str(torch_folder)}, machine, keep_alive=None)
    serve._bring(pool, machine, "m", str(torch_folder), lazy=True)
    assert pool.model("m") is None
    assert list((tmp_path / "cache" / "converted").iterdir())
    monkeypatch.setattr("mlxinfer.cli.converted.loadable", None)
    assert machine.predict(str(torch_folder), threading.Event()) > 0
    model = machine.load(str(torch_folder), threading.Event())
    assert model.info.name == str(torch_folder)
    model.unload()
    pool.close()


def test_a_folder_is_named_by_what_has_to_be_converted(torch_folder: Path, quantized: Path, tmp_path: Path) -> None:
    assert needs_conversion(torch_folder) == "torch's .bin files"
    assert needs_conversion(quantized) == "quantized by gptq"
    assert needs_conversion(tiny.write_folder(tmp_path / "plain")) is None
    (torch_folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelFileError, match="not all of its weights"):
        resolve(str(torch_folder), Settings(cache_dir=tmp_path))


def test_what_can_be_loaded_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=tmp_path / "cache")
    files = resolve(str(tiny.write_folder(tmp_path / "plain")), settings)
    assert converted.loadable(files, settings) is files
    from tests.unit.formats.gguf_files import tiny_model

    gguf = resolve(str(tiny_model().write(tmp_path / "m.gguf")), settings)
    assert converted.loadable(gguf, settings) is gguf
    monkeypatch.setattr(converted, "GGUF_BYTES", 1000)
    assert converted.loadable(gguf, settings).kind == "folder", "a large one is laid out once"
