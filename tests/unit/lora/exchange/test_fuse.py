"""An adapter in the weights of its base: what is computed, what each layer keeps, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxinfer.convert import Packing
from mlxinfer.convert.export import folder as exported
from mlxinfer.errors import ConversionError, InvalidRequestError, UnsupportedModelError
from mlxinfer.lora import MethodOptions, save_adapter
from mlxinfer.lora.changes import Form, Fused, Kept
from mlxinfer.lora.fuse import FuseOptions, fuse
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import IDS, adapt

QUANTIZED = {"bits": 4, "group_size": 32, "mode": "affine"}
CASES = [
    ("llama", MethodOptions("lora", rank=4, targets=("self_attn.*", "mlp.*"))),
    ("llama", MethodOptions("rslora", rank=4, targets=("embed_tokens", "lm_head"))),
    ("llama", MethodOptions("dora", rank=4, num_layers=1)),
    ("gemma3_text", MethodOptions("dora", rank=4, targets=("embed_tokens", "q_proj"))),
    ("mixtral", MethodOptions("lora", rank=4)),
    ("qwen3_moe", MethodOptions("lora", rank=2, targets=("switch_mlp.*", "mlp.gate"))),
    ("llama", MethodOptions("full")),
    ("qwen2", MethodOptions("full", num_layers=1)),
]


def made(tmp_path: Path, model_type: str, options: MethodOptions, *, size: float = 0.1, **how: Any) -> Any:
    """Folders `base` and `adapter`, and the adapted model."""
    base = models.write(tmp_path / "base", model_type, **how)
    net = adapt(models.load(base), options, size=size)
    save_adapter(tmp_path / "adapter", net, options, {})
    return net


def off_by(left: mx.array, right: mx.array) -> float:
    return float(np.abs(np.array(left) - np.array(right)).max() / np.abs(np.array(right)).max())


@pytest.mark.parametrize(("model_type", "options"), CASES)
@pytest.mark.parametrize("elements", [2**22, 150])
def test_a_fused_float_model_computes_what_base_and_adapter_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, options: MethodOptions, elements: int
) -> None:
    monkeypatch.setattr(exported, "SLICE_ELEMENTS", elements)
    net = made(tmp_path, model_type, options)
    fused = fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    after = models.load(tmp_path / "out")
    assert off_by(after(IDS), net(IDS)) < 1e-5
    assert off_by(models.load(tmp_path / "base")(IDS), net(IDS)) > 1e-2
    assert all(kept.share > 0.999 for kept in fused.layers)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("dequantize", ["adapted", "all"])
def test_layers_kept_in_floats_keep_all_of_the_adapter(tmp_path: Path, dequantize: Any) -> None:
    options = MethodOptions("lora", rank=4, targets=("q_proj", "mlp.*"))
    net = made(tmp_path, "llama", options, quantization=QUANTIZED, size=0.02)
    fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(dequantize=dequantize))
    after = models.load(tmp_path / "out")
    assert off_by(after(IDS), net(IDS)) < 1e-5
    packed = {path for path, module in after.named_modules() if isinstance(module, nn.QuantizedLinear)}
    assert bool(packed) == (dequantize == "adapted")
    assert not [path for path in packed if any(path.endswith(name.strip("*.")) for name in options.targets)]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("quantization" in config) == (dequantize == "adapted")


def test_a_change_that_packing_would_lose_is_refused_with_its_layers_and_leaves_nothing(tmp_path: Path) -> None:
    options = MethodOptions("lora", rank=4, targets=("q_proj",))
    made(tmp_path, "llama", options, quantization=QUANTIZED, size=0.01)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError) as caught:
        fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    said = str(caught.value)
    assert "2 of 2 layers would keep less than 90%" in said
    assert all(f"model.layers.{n}.self_attn.q_proj.weight keeps" in said for n in (0, 1))
    assert "--dequantize adapted" in said
    assert sorted(tmp_path.iterdir()) == before
    fused = fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(force=True))
    assert len(fused.lost) == 2
    models.load(tmp_path / "out")


def test_what_a_layer_kept_is_what_its_stored_weights_say(tmp_path: Path) -> None:
    options = MethodOptions("lora", rank=4, targets=("q_proj",))
    net = made(tmp_path, "llama", options, quantization=QUANTIZED, size=0.3)
    fused = fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(force=True))
    before: Any = dict(models.load(tmp_path / "base").named_modules())
    after: Any = dict(models.load(tmp_path / "out").named_modules())

    def floats(layer: Any) -> np.ndarray:
        return np.array(mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits))

    for kept in fused.layers:
        path = kept.name.removesuffix(".weight")
        layer = dict(net.named_modules())[path]
        delta = np.array(layer.scale * (layer.lora_a @ layer.lora_b).T, np.float64).ravel()
        change = (floats(after[path]).astype(np.float64) - floats(before[path])).ravel()
        assert kept.cosine == pytest.approx(delta @ change / np.linalg.norm(delta) / np.linalg.norm(change), abs=1e-4)
        assert kept.norm == pytest.approx(np.linalg.norm(change) / np.linalg.norm(delta), abs=1e-4)
        assert 0.5 < kept.share < 1
    told = json.loads((tmp_path / "out" / "fusion.json").read_text())
    assert [layer["kept"] for layer in told["layers"]] == [kept.share for kept in fused.layers]


def test_more_bits_for_the_adapted_layers_keep_more_and_the_others_keep_theirs(tmp_path: Path) -> None:
    options = MethodOptions("lora", rank=4, targets=("q_proj",))
    net = made(tmp_path, "llama", options, quantization=QUANTIZED, size=0.1)
    fused = fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(packing=Packing(8, 32)))
    assert not fused.lost
    after = models.load(tmp_path / "out")
    bits = {path.rpartition(".")[2]: m.bits for path, m in after.named_modules() if isinstance(m, nn.QuantizedLinear)}
    assert bits["q_proj"] == 8
    assert bits["k_proj"] == 4
    assert off_by(after(IDS), net(IDS)) < 0.05


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_modes_without_biases_are_packed_again(tmp_path: Path, mode: str) -> None:
    packing = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    quantization = {"bits": packing[0], "group_size": packing[1], "mode": mode}
    net = made(
        tmp_path, "llama", MethodOptions("lora", rank=4, targets=("mlp.*",)), quantization=quantization, size=0.5
    )
    fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(force=True))
    after: Any = models.load(tmp_path / "out")
    assert after.layers[0].mlp.up_proj.mode == mode
    assert off_by(after(IDS), net(IDS)) < off_by(models.load(tmp_path / "base")(IDS), net(IDS))


def test_half_precision_that_swallows_a_small_change_is_refused(tmp_path: Path) -> None:
    options = MethodOptions("lora", rank=1, alpha=0.001, targets=("q_proj",))
    net = made(tmp_path, "llama", options, dtype=mx.bfloat16, size=0.02)
    with pytest.raises(ConversionError, match="--dtype float32"):
        fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(dtype="float32"))
    net.set_dtype(mx.float32)
    assert off_by(models.load(tmp_path / "out")(IDS), net(IDS)) < 1e-5


def test_tensors_that_the_adapter_leaves_alone_are_copied_to_the_bit(tmp_path: Path) -> None:
    made(tmp_path, "llama", MethodOptions("lora", rank=4, targets=("q_proj",)), quantization=QUANTIZED)
    fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", FuseOptions(dequantize="adapted"))
    before: Any = mx.load(str(tmp_path / "base" / "model.safetensors"))
    after: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name, value in before.items():
        if "q_proj" not in name:
            assert mx.array_equal(after[name].view(mx.uint8), value.view(mx.uint8)).item(), name


def test_a_destination_in_the_way_a_dry_run_and_an_adapter_of_another_base(tmp_path: Path) -> None:
    made(tmp_path, "llama", MethodOptions("lora", rank=4, targets=("q_proj",)))
    assert fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", dry_run=True).nbytes > 0
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidRequestError, match="exists already"):
        fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    (tmp_path / "base" / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="holds an adapter"):
        fuse(tmp_path / "base", tmp_path / "adapter", tmp_path / "other")


def test_a_layer_is_lost_where_its_change_shrank_turned_or_is_no_number() -> None:
    def kept(cosine: float, norm: float) -> Kept:
        return Kept(f"{cosine} {norm}", Form(None, "F32"), 0.1, cosine, norm)

    layers = (kept(1.0, 1.0), kept(1.0, 0.9), kept(0.9, 1.3), kept(1.0, 0.89), kept(0.89, 1.3), kept(math.nan, 1.0))
    fused = Fused(Path("x"), layers, 0)
    assert {one.name for one in fused.lost} == {"1.0 0.89", "0.89 1.3", "nan 1.0"}
    assert kept(0.8, 0.5).share == pytest.approx(0.4)
    assert kept(0.8, 2.0).share == pytest.approx(0.8)
