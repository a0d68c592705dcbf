"""The exported folder is what transformers loads (goldens of make_goldens.py) and what mlx-lm reads back unchanged."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.convert.export import folder as folders
from mlxinfer.convert.export import writing
from mlxinfer.convert.export.huggingface import export_huggingface
from mlxinfer.convert.export.writing import ExportError
from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from tests.unit.convert.export import models
from tests.unit.convert.export.make_goldens import FIXTURE, IDS, QUANTIZATION, STRIDE, digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import mlx.nn as nn

TOLERANCE = 1e-5
"""Of the largest logit; what is seen is up to 3e-6, the order in which two programs add."""


def logits_of(model: nn.Module) -> np.ndarray:
    """float32 (tokens, vocabulary)."""
    return np.array(model(mx.array([IDS]), cache=upstream.make_cache(model))[0].astype(mx.float32))


def weights_of(model: nn.Module) -> dict[str, Any]:
    flat: Any = tree_flatten(model.parameters())
    return dict(flat)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_transformers_computes_the_logits_of_the_packed_model_from_its_export(tmp_path: Path, family: str) -> None:
    with np.load(FIXTURE, allow_pickle=False) as file:
        golden, sha256 = file[f"hf_{family}"], file[f"hf_{family}_sha256"].tobytes()
    source = models.write(tmp_path / "mlx", family, quantization=QUANTIZATION)
    export_huggingface(source, tmp_path / "hf", dtype="float32")
    assert digest(tmp_path / "hf") == sha256, "the export is not the one that the golden is of"
    logits = logits_of(models.load(source))
    assert len(set(logits.argmax(axis=-1))) >= 8, "the output must depend on the context"
    assert np.abs(logits[:, ::STRIDE] - golden).max() <= TOLERANCE * np.abs(logits).max()


@pytest.mark.parametrize("family", [f for f in models.FAMILIES if f != "gpt_oss"])
def test_mlx_lm_reads_an_export_back_as_the_same_weights(tmp_path: Path, family: str) -> None:
    source = models.write(tmp_path / "mlx", family)
    export_huggingface(source, tmp_path / "hf")
    before, after = weights_of(models.load(source)), weights_of(models.load(tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
def test_float32_holds_every_value_that_mlx_computes_with(tmp_path: Path, mode: str) -> None:
    groups = {"affine": (3, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
    bits, group = groups[mode]
    quantization = {"bits": bits, "group_size": group, "mode": mode}
    source = models.write(tmp_path / "mlx", "llama", intermediate_size=128, quantization=quantization)
    outcome = export_huggingface(source, tmp_path / "hf", dtype="float32")
    assert {o.handling for o in outcome.outputs} == {"exact"}
    packed, plain = weights_of(models.load(source)), weights_of(models.load(tmp_path / "hf"))
    name = "model.layers.1.mlp.down_proj"
    expected = mx.dequantize(
        packed[f"{name}.weight"],
        packed[f"{name}.scales"],
        packed.get(f"{name}.biases"),
        group_size=group,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )
    assert mx.array_equal(plain[f"{name}.weight"], expected).item()


def test_slices_of_a_tensor_make_up_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.write(tmp_path / "mlx", "mixtral", quantization=QUANTIZATION)
    export_huggingface(source, tmp_path / "whole")
    monkeypatch.setattr(folders, "SLICE_ELEMENTS", 7 * 64)
    export_huggingface(source, tmp_path / "sliced")
    assert digest(tmp_path / "whole") == digest(tmp_path / "sliced")


def test_the_config_is_free_of_mlx_and_says_what_mlx_lm_assumed(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "qwen2", dtype=mx.bfloat16, quantization=QUANTIZATION)
    config = json.loads((source / "config.json").read_text())
    del config["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    export_huggingface(source, tmp_path / "hf")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "quantization" not in written
    assert "quantization_config" not in written
    assert (written["tie_word_embeddings"], written["dtype"], written["torch_dtype"]) == (True, "bfloat16", "bfloat16")
    assert written["architectures"] == ["Qwen2ForCausalLM"]
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_shards_stay_below_the_limit_and_the_index_names_each_tensor(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    outcome = export_huggingface(source, tmp_path / "hf", max_shard_bytes=100_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == outcome.nbytes
    assert index["weight_map"].keys() == {o.name for o in outcome.outputs}
    assert weights_of(models.load(tmp_path / "hf")).keys() == {o.name for o in outcome.outputs}


def test_rounding_is_reported_as_near(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    outcome = export_huggingface(source, tmp_path / "hf", dtype="bfloat16", dry_run=True)
    assert {(o.handling, o.note) for o in outcome.outputs} == {("near", "rounded to bfloat16")}
    assert not (tmp_path / "hf").exists()


def test_a_number_beyond_float16_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    weights: Any = mx.load(str(source / "model.safetensors"))
    weights["model.norm.weight"] = mx.full((64,), 1e5)
    mx.save_safetensors(str(source / "model.safetensors"), weights)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has numbers beyond float16"):
        export_huggingface(source, tmp_path / "hf", dtype="float16")
    assert [p.name for p in tmp_path.iterdir()] == ["mlx"]


def test_what_is_at_the_destination_stays(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    (tmp_path / "hf").mkdir()
    with pytest.raises(InvalidRequestError, match="hf exists already"):
        export_huggingface(source, tmp_path / "hf")
    with pytest.raises(InvalidRequestError, match="nowhere is no folder"):
        export_huggingface(source, tmp_path / "nowhere" / "hf")


def test_a_disk_too_small_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(ExportError, match=r"has .* free; free at least"):
        export_huggingface(source, tmp_path / "hf")


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = models.write(tmp_path / "mlx", "llama")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(ExportError, match="the disk is full; nothing of it is left"):
        export_huggingface(source, tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["mlx"]


def test_what_a_killed_export_left_is_cleared_and_what_a_running_one_has_is_kept(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    for pid in (999_999_999, os.getppid()):
        (tmp_path / f".hf.{pid}.partial").mkdir()
    export_huggingface(source, tmp_path / "hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".hf.{os.getppid()}.partial", "hf", "mlx"]


def test_a_cancelled_export_leaves_nothing(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    cancel, seen = threading.Event(), []

    def report(done: int, total: int) -> None:
        seen.append((done, total))
        cancel.set()

    with pytest.raises(ExportError, match="cancelled"):
        export_huggingface(source, tmp_path / "hf", report=report, cancel=cancel)
    assert len(seen) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["mlx"]


def test_an_architecture_that_cannot_be_undone_is_named(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "xverse"}))
    with pytest.raises(UnsupportedModelError, match=r"'xverse' can't be exported to transformers.*known: gemma, "):
        export_huggingface(source, tmp_path / "hf")


def test_a_rotation_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama", rope_traditional=True)
    with pytest.raises(UnsupportedModelError, match="sets rope_traditional"):
        export_huggingface(source, tmp_path / "hf")


def edited(source: Path, *, drop: str = "", add: str = "", reshape: str = "") -> None:
    weights: Any = mx.load(str(source / "model.safetensors"))
    weights.pop(drop, None)
    if add:
        weights[add] = mx.zeros((4,))
    if reshape:
        weights[reshape] = weights[reshape][:-1]
    mx.save_safetensors(str(source / "model.safetensors"), weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "model.norm.weight"}, r"model\.norm\.weight is missing"),
        ({"drop": "lm_head.weight"}, r"lm_head\.weight is missing"),
        ({"add": "model.extra"}, r"model\.extra is not part of it"),
        ({"reshape": "model.norm.weight"}, r"model\.norm\.weight has shape \(63,\), not \(64,\)"),
    ],
)
def test_weights_that_are_not_the_architectures_are_named(tmp_path: Path, change: dict[str, str], message: str) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    edited(source, **change)
    with pytest.raises(ModelFileError, match=f"are not those of llama: {message}"):
        export_huggingface(source, tmp_path / "hf")


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    source = models.write(tmp_path / "mlx", "llama")
    (source / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="fuse it into the model first"):
        export_huggingface(source, tmp_path / "hf")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 7, "group_size": 32}, r"bits=7, group_size=32"),
        ({"bits": 4, "group_size": 64}, r"don't fit 4 bits in groups of 64"),
        ({"bits": 4, "group_size": 32, "mode": "odd"}, r"quantization mode 'odd'"),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, r"don't fit the mode mxfp4"),
        ([4], r"quantization is \[4\]"),
    ],
)
def test_a_quantization_that_the_shapes_contradict_is_an_error(
    tmp_path: Path, quantization: object, message: str
) -> None:
    source = models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization": quantization}))
    with pytest.raises((ModelFileError, UnsupportedModelError), match=message):
        export_huggingface(source, tmp_path / "hf")


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_memory_is_that_of_a_few_slices(tmp_path: Path, traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SLICE_ELEMENTS", 2**16)
    size = {"hidden_size": 256, "intermediate_size": 8192, "vocab_size": 8192, "num_hidden_layers": 1}
    source = models.write(tmp_path / "mlx", "llama", quantization=QUANTIZATION, **size)
    begun: list[int] = []

    def report(done: int, _: int) -> None:
        if not begun:
            tracemalloc.reset_peak()  # the config's reader asks for its limit, 64 MiB, which is never touched
        begun.append(done)

    outcome = export_huggingface(source, tmp_path / "hf", dtype="float32", report=report)
    assert outcome.nbytes > 30e6
    assert tracemalloc.get_traced_memory()[1] < 3e6
