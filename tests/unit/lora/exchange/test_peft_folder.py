"""PEFT's folders: experts, what is refused and by which name, and files that are wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from mlxinfer.lora import MethodOptions, peft, save_adapter
from mlxinfer.lora.adapter import read_adapter
from mlxinfer.lora.peft import read_peft
from mlxinfer.lora.peft_config import PeftConfig
from mlxinfer.lora.peft_write import write_peft
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import adapt
from tests.unit.lora.rows import model

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}


def tensors(rank: int = 4) -> dict[str, mx.array]:
    return {f"{LAYER}.lora_A.weight": mx.ones((rank, 64)), f"{LAYER}.lora_B.weight": mx.ones((64, rank))}


def write(folder: Path, weights: dict[str, mx.array] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors() if weights is None else weights)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_experts_are_one_by_one_there_and_stacked_here(tmp_path: Path, model_type: str) -> None:
    net = models.build(models.config(model_type))
    options = MethodOptions(rank=2, alpha=3.0, targets=("switch_mlp.*", "q_proj"), num_layers=1)
    save_adapter(tmp_path / "ours", adapt(net, options), options, {})
    base = models.build(models.config(model_type))
    adapter = read_adapter(tmp_path / "ours", base)
    write_peft(tmp_path / "peft", adapter, base)
    stored: Any = mx.load(str(tmp_path / "peft" / "adapter_model.safetensors"))
    single = {"mixtral": "block_sparse_moe.experts.1.w3"}.get(model_type, "mlp.experts.1.up_proj")
    stack = "block_sparse_moe.switch_mlp" if model_type == "mixtral" else "mlp.switch_mlp"
    ours = adapter.weights[f"model.layers.1.{stack}.up_proj.lora_a"]
    assert mx.array_equal(stored[f"base_model.model.model.layers.1.{single}.lora_A.weight"], ours[1]).item()
    back = read_peft(tmp_path / "peft", base)
    assert back.weights.keys() == adapter.weights.keys()
    assert all(mx.array_equal(back.weights[name], value).item() for name, value in adapter.weights.items())
    assert back.options.scale == adapter.options.scale
    del stored[f"base_model.model.model.layers.1.{single}.lora_A.weight"]
    mx.save_safetensors(str(tmp_path / "peft" / "adapter_model.safetensors"), stored)
    with pytest.raises(ModelFileError, match=r"up_proj\.lora_A of expert 1 is missing"):
        read_peft(tmp_path / "peft", base)


def test_every_tensor_that_does_not_fit_is_named_at_once(tmp_path: Path) -> None:
    wrong = {
        f"{LAYER}.lora_A.weight": mx.ones((4, 32)),
        f"{LAYER}.lora_B.weight": mx.ones((64, 4)),
        f"{LAYER.replace('q_proj', 'k_proj')}.lora_A.weight": mx.ones((4, 64)),
        f"{LAYER.replace('q_proj', 'v_proj')}.lora_A.weight": mx.ones((4, 64), mx.int32),
        f"{LAYER.replace('q_proj', 'w_pack')}.lora_A.weight": mx.ones((4, 64)),
        "base_model.model.lm_head.weight": mx.ones((320, 64)),
        "base_model.model.lm_head.base_layer.weight": mx.ones((321, 64)),
        f"{LAYER}.lora_B.bias": mx.ones((64,)),
    }
    with pytest.raises(ModelFileError) as caught:
        read_peft(write(tmp_path, wrong), model())
    for problem in (
        "q_proj.lora_A is (4, 32); the base has (4, 64)",
        "k_proj.lora_B is missing",
        "v_proj.lora_A.weight is mlx.core.int32",
        "w_pack.lora_A.weight is for a layer that the base doesn't have",
        "lm_head.weight is no part of a LoRA or DoRA layer",
        "lm_head.base_layer.weight is (321, 64); the base has (320, 64)",
        "q_proj.lora_B.bias is no part of",
    ):
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"peft_type": "IA3"}, UnsupportedModelError, "peft_type is 'IA3'"),
        ({"bias": "lora_only"}, UnsupportedModelError, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
        ({"target_parameters": ["experts.down_proj"]}, UnsupportedModelError, "target_parameters"),
        ({"lora_bias": True}, UnsupportedModelError, "lora_bias is True"),
        ({"fan_in_fan_out": True}, UnsupportedModelError, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, UnsupportedModelError, "layer_replication"),
        ({"something_new": 3}, UnsupportedModelError, "something_new is 3"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedModelError, "changes the base's own weights"),
        ({"alpha_pattern": {"(a+)+$": 3}}, UnsupportedModelError, "more than the end of a layer's path"),
        ({"alpha_pattern": [3]}, ModelFileError, "alpha_pattern is"),
        ({"lora_alpha": 10**400}, ModelFileError, "lora_alpha is 1000"),
        ({"alpha_pattern": {"q_proj": 10**400}}, ModelFileError, "alpha_pattern.q_proj is 1000"),
        ({"use_rslora": "yes"}, ModelFileError, "use_rslora is 'yes'; true or false"),
        ({"init_lora_weights": ["pissa"]}, ModelFileError, "init_lora_weights is"),
        ({"r": 16}, ModelFileError, "q_proj.lora_A is of rank 4; adapter_config.json has r 16 and no rank_pattern"),
        ({"alpha_pattern": {"q_proj": "x"}}, ModelFileError, r"alpha_pattern\.q_proj is 'x'"),
        ({"r": 0}, ModelFileError, "r is 0"),
        ({"r": True}, ModelFileError, "r is True"),
        ({"lora_alpha": float("nan")}, ModelFileError, "lora_alpha is nan"),
        ({"lora_dropout": 1.0}, ModelFileError, "lora_dropout is 1.0"),
        ({"use_dora": True}, ModelFileError, r"q_proj\.lora_magnitude_vector is missing"),
    ],
)
def test_what_is_not_honoured_is_refused_by_its_name(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        read_peft(write(tmp_path, **changes), model())


def test_a_magnitude_without_dora_an_empty_file_a_pickle_and_a_torn_file(tmp_path: Path) -> None:
    extra = tensors() | {f"{LAYER}.lora_magnitude_vector": mx.ones((64,))}
    with pytest.raises(ModelFileError, match="lora_magnitude_vector has no use here"):
        read_peft(write(tmp_path, extra), model())
    with pytest.raises(ModelFileError, match="holds no tensor"):
        read_peft(write(tmp_path, {}), model())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors"):
        read_peft(tmp_path, model())
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UnsupportedModelError, match="a pickle"):
        read_peft(tmp_path, model())


def test_names_of_an_architecture_that_mlx_lm_renames_are_not_guessed(tmp_path: Path) -> None:
    class Renamed:
        model_type = "renamed"

        def sanitize(self, weights: Any) -> Any:
            return weights

    with pytest.raises(UnsupportedModelError, match="'renamed' can't be exchanged"):
        read_peft(write(tmp_path), Renamed())  # type: ignore[arg-type]


def test_half_precision_stays_as_it_is(tmp_path: Path) -> None:
    given = {name: value.astype(mx.bfloat16) for name, value in tensors().items()}
    adapter = read_peft(write(tmp_path, given), model())
    assert {value.dtype for value in adapter.weights.values()} == {mx.bfloat16}


@pytest.mark.parametrize(
    ("pattern", "alpha"),
    [
        ("q_proj", 3.0), ("self_attn.q_proj", 3.0), ("^model.layers.0.self_attn.q_proj", 3.0),
        (r"layers\.0\.self_attn\.q_proj$", 3.0), ("proj", 8.0), ("^q_proj", 8.0), ("k_proj", 8.0),
    ],
)  # fmt: skip
def test_alpha_patterns_fit_as_in_peft(pattern: str, alpha: float) -> None:
    config = PeftConfig(4, 8.0, False, False, 0.0, {pattern: 3.0})
    assert config.alpha_of("model.layers.0.self_attn.q_proj") == alpha


def test_a_padded_rank_that_was_trained_further_is_exported_whole(tmp_path: Path) -> None:
    other = LAYER.replace("q_proj", "k_proj")
    given = tensors() | {f"{other}.lora_A.weight": mx.ones((2, 64)), f"{other}.lora_B.weight": mx.ones((32, 2))}
    base = model()
    adapter = read_peft(write(tmp_path / "in", given, rank_pattern={"k_proj": 2}), base)
    name = "model.layers.0.self_attn.k_proj"
    assert adapter.weights[f"{name}.lora_a"].shape == (64, 4)
    write_peft(tmp_path / "same", adapter, base)
    weights = dict(adapter.weights) | {f"{name}.lora_a": adapter.weights[f"{name}.lora_a"] + 1}
    trained = type(adapter)(adapter.options, weights, adapter.notes)
    write_peft(tmp_path / "more", trained, base)
    for folder, rank in (("same", 2), ("more", 4)):
        stored: Any = mx.load(str(tmp_path / folder / "adapter_model.safetensors"))
        assert stored[f"{other}.lora_A.weight"].shape == (rank, 64)
        back = read_peft(tmp_path / folder, base)
        wanted = trained if folder == "more" else adapter
        for held in (back, wanted):
            assert held.options.rank == 4
        product = [
            h.options.scale * (h.weights[f"{name}.lora_a"] @ h.weights[f"{name}.lora_b"]) for h in (back, wanted)
        ]
        np.testing.assert_allclose(np.array(product[0]), np.array(product[1]), rtol=1e-6)


def test_ranks_that_would_be_padded_to_more_than_fits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft, "MAX_PADDED_BYTES", 4 * 1000)
    other = LAYER.replace("q_proj", "k_proj")
    given = tensors() | {f"{other}.lora_A.weight": mx.ones((1, 64)), f"{other}.lora_B.weight": mx.ones((32, 1))}
    read_peft(write(tmp_path / "few"), model())
    monkeypatch.setattr(peft, "MAX_PADDED_BYTES", 4 * 800)
    with pytest.raises(ModelFileError, match="ranks from 1 to 4"):
        read_peft(write(tmp_path / "many", given, rank_pattern={"k_proj": 1}), model())


def test_a_folder_in_the_way_is_left_alone(tmp_path: Path) -> None:
    base = model()
    adapter = read_peft(write(tmp_path / "in"), base)
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidRequestError, match="exists already"):
        write_peft(tmp_path / "out", adapter, base)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tensor_that_holds_no_number_is_named(value: float, tmp_path: Path) -> None:
    given = tensors()
    given[f"{LAYER}.lora_A.weight"][1, 2] = value
    with pytest.raises(ModelFileError, match=r"q_proj\.lora_A\.weight holds NaN or infinity"):
        read_peft(write(tmp_path, given), model())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_noted_scale_that_cannot_be_changes_nothing(scale: float, tmp_path: Path) -> None:
    base = model()
    adapter = read_peft(write(tmp_path / "in"), base)
    noted = type(adapter)(adapter.options, adapter.weights, {"peft": {"model.layers.0.self_attn.q_proj": [4, scale]}})
    write_peft(tmp_path / "out", noted, base)
    back = read_peft(tmp_path / "out", base)
    assert all(mx.array_equal(back.weights[name], value).item() for name, value in adapter.weights.items())


def test_rslora_on_experts_is_written_as_lora_of_the_same_scale(tmp_path: Path) -> None:
    options = MethodOptions("rslora", rank=4, alpha=6.0, targets=("switch_mlp.*", "q_proj"))
    write_peft(tmp_path / "peft", _made(tmp_path / "ours", options), models.build(models.config("mixtral")))
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert config["use_rslora"] is False
    assert config["lora_alpha"] / config["r"] == options.scale == 3.0
    plain = MethodOptions("rslora", rank=4, alpha=6.0, targets=("q_proj",))
    write_peft(tmp_path / "plain", _made(tmp_path / "its", plain), models.build(models.config("mixtral")))
    config = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert (config["use_rslora"], config["lora_alpha"]) == (True, 6)


def _made(folder: Path, options: MethodOptions) -> Any:
    save_adapter(folder, adapt(models.build(models.config("mixtral")), options), options, {})
    return read_adapter(folder, models.build(models.config("mixtral")))
