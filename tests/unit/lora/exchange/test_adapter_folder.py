"""An adapter's folder: weights and config that belong together, and to the model that they are put on."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.engine import adapter_files
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.lora import MethodOptions, load_adapter
from mlxinfer.lora.adapter import read_adapter
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import IDS, write
from tests.unit.lora.rows import model

FIRST = MethodOptions(rank=4, alpha=8.0, targets=("q_proj",))
SECOND = MethodOptions(rank=4, alpha=64.0, targets=("q_proj",))


class Killed(BaseException):
    """What a process that is killed does not catch."""


@pytest.mark.parametrize("survived", range(8))
def test_an_adapter_that_was_being_replaced_when_the_process_was_killed_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    old = np.array(write(tmp_path, model(), FIRST)(IDS))
    new = np.array(write(tmp_path.parent / "other", model(), SECOND, seed=9)(IDS))
    renamed = 0
    real = {"replace": Path.replace, "rename": Path.rename, "rmdir": Path.rmdir}

    def killing(name: str) -> Any:
        def act(self: Path, *args: Any) -> Any:
            nonlocal renamed
            if renamed == survived:
                raise Killed
            renamed += 1
            return real[name](self, *args)

        return act

    for name in real:
        monkeypatch.setattr(Path, name, killing(name))
    with contextlib.suppress(Killed):
        write(tmp_path, model(), SECOND, seed=9)
    monkeypatch.undo()
    found = model()
    load_adapter(found, tmp_path)
    found.eval()
    said = np.array(found(IDS))
    assert (said == old).all() or (said == new).all()
    assert (said == new).all() or survived < 2


def test_weights_beside_the_config_of_others_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", model(), FIRST)
    write(tmp_path / "b", model(), SECOND, seed=9)
    shutil.copy(tmp_path / "a" / "adapters.safetensors", tmp_path / "b")
    with pytest.raises(ModelFileError, match=r"adapter_config\.json is the config of other weights"):
        read_adapter(tmp_path / "b", model())
    with pytest.raises(ModelFileError, match=r"adapter_config\.json is the config of other weights"):
        adapter_files.read_adapter("b", tmp_path / "b")
    assert adapter_files.read_adapter("a", tmp_path / "a").rank == 4


def test_every_layer_and_tensor_of_an_adapter_for_another_base_is_named(tmp_path: Path) -> None:
    write(tmp_path, model(), MethodOptions(rank=4, targets=("q_proj", "down_proj")))
    with pytest.raises(ModelFileError) as caught:
        load_adapter(model(hidden_size=128), tmp_path)
    for layer in (0, 1):
        assert f"layers.{layer}.self_attn.q_proj has the shape 64x64 in its base and 64x128 here" in str(caught.value)
        assert f"layers.{layer}.self_attn.q_proj.lora_a is (64, 4); the model has (128, 4)" in str(caught.value)
        assert f"layers.{layer}.mlp.down_proj.lora_b is (4, 64); the model has (4, 128)" in str(caught.value)


def test_an_adapter_of_another_architecture_with_the_same_shapes_is_refused(tmp_path: Path) -> None:
    write(tmp_path, models.build(models.config("qwen2")), FIRST)
    with pytest.raises(ModelFileError, match="its base is 'qwen2', this model is 'llama'"):
        load_adapter(models.build(models.config("llama")), tmp_path)


def test_a_refused_adapter_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, model(hidden_size=128), FIRST)
    net = model()
    before = np.array(net(IDS))
    with pytest.raises(ModelFileError):
        load_adapter(net, tmp_path)
    assert all("lora_a" not in module for module in net.modules())
    np.testing.assert_array_equal(np.array(net(IDS)), before)


def test_missing_extra_and_integer_tensors_are_all_named(tmp_path: Path) -> None:
    write(tmp_path, model(), FIRST)
    path = tmp_path / "adapters.safetensors"
    weights: Any = mx.load(str(path))
    weights = {name: mx.array(value) for name, value in weights.items()}
    del weights["model.layers.0.self_attn.q_proj.lora_a"]
    weights["model.layers.1.self_attn.q_proj.lora_b"] = mx.zeros((4, 64), mx.int32)
    weights["model.layers.7.nothing.lora_a"] = mx.zeros((4, 4))
    mx.save_safetensors(str(path), weights)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["mlxinfer"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError) as caught:
        read_adapter(tmp_path, model())
    for problem in ("0.self_attn.q_proj.lora_a is missing", "lora_b is mlx.core.int32", "7.nothing.lora_a is nothing"):
        assert problem in str(caught.value)


def test_a_folder_without_a_config_and_one_of_peft_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"adapter_config\.json is missing"):
        read_adapter(tmp_path, model())
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedModelError, match="mlxinfer lora import"):
        read_adapter(tmp_path, model())


@pytest.mark.parametrize("base", [3, {"model_type": "llama"}, {"model_type": "llama", "layers": []}])
def test_a_record_of_the_base_that_is_none_is_refused(tmp_path: Path, base: object) -> None:
    write(tmp_path, model(), FIRST)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["mlxinfer"]["base"] = base
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"mlxinfer\.base is"):
        read_adapter(tmp_path, model())


def test_method_and_alpha_come_back_and_an_edited_scale_goes_before_them(tmp_path: Path) -> None:
    options = MethodOptions("rslora", rank=3, alpha=7.0, targets=("q_proj",))
    write(tmp_path, model(), options)
    found = read_adapter(tmp_path, model()).options
    assert (found.method, found.alpha, found.scale) == ("rslora", 7.0, options.scale)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["lora_parameters"]["scale"] = 0.5
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    found = read_adapter(tmp_path, model()).options
    assert (found.method, found.scale) == ("lora", 0.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scale", 10**400, "scale is 1000"),
        ("scale", 1e39, "scale is 1e"),
        ("dropout", 10**400, "dropout is 1000"),
        ("alpha", 10**400, ""),
        ("alpha", float("nan"), ""),
    ],
)
def test_a_number_that_no_float_holds_is_refused_or_not_used(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    write(tmp_path, model(), FIRST)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["mlxinfer" if name == "alpha" else "lora_parameters"][name] = value
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if message:
        with pytest.raises(ModelFileError, match=message):
            read_adapter(tmp_path, model())
    else:
        assert read_adapter(tmp_path, model()).options.scale == FIRST.scale


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_hold_no_number_are_named(value: float, tmp_path: Path) -> None:
    write(tmp_path, model(), FIRST)
    path = tmp_path / "adapters.safetensors"
    weights: dict[str, mx.array] = {key: mx.array(held) for key, held in mx.load(str(path)).items()}  # type: ignore[union-attr]
    weights["model.layers.0.self_attn.q_proj.lora_b"][1, 2] = value
    mx.save_safetensors(str(path), weights)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    del config["mlxinfer"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"damaged.*q_proj\.lora_b holds NaN or infinity"):
        read_adapter(tmp_path, model())
