"""Methods on a model, and adapters as mlx-lm reads and writes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.lora import MethodOptions, adapter_off, apply, load_adapter, save_adapter
from tests.unit.lora.rows import model

if TYPE_CHECKING:
    from pathlib import Path

IDS = mx.array([[3, 4, 5, 6, 7]])


def adapted(options: MethodOptions, net: Any = None) -> Any:
    """A model whose adapters do something."""
    net = net or model()
    apply(net, options)
    mx.random.seed(3)
    found = tree_flatten(net.trainable_parameters())
    net.load_weights([(name, value + 0.1 * mx.random.normal(value.shape)) for name, value in found], strict=False)
    return net


@pytest.mark.parametrize("method", ["lora", "dora", "rslora"])
@pytest.mark.parametrize("num_layers", [None, 1])
def test_mlx_lm_reads_ours_and_we_read_it(tmp_path: Path, method: Any, num_layers: int | None) -> None:
    from mlx_lm.tuner.utils import load_adapters

    options = MethodOptions(method, rank=4, targets=("q_proj", "mlp.*"), num_layers=num_layers)
    net = adapted(options)
    save_adapter(tmp_path, net, options, {"note": "x"})
    theirs, ours = load_adapters(model(), str(tmp_path)), model()
    load_adapter(ours, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapters.safetensors"]
    wanted = np.array(net(IDS))
    assert np.abs(wanted - np.array(model()(IDS))).max() > 1e-3
    np.testing.assert_array_equal(np.array(theirs(IDS)), wanted)
    np.testing.assert_array_equal(np.array(ours(IDS)), wanted)


@pytest.mark.parametrize("keys", [None, ["self_attn.q_proj", "mlp.up_proj"]])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_mlx_lm_made_is_read(tmp_path: Path, keys: list[str] | None, dora: bool) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0} | ({"keys": keys} if keys else {})
    net = model()
    net.freeze()
    linear_to_lora_layers(net, 1, parameters, use_dora=dora)
    found = tree_flatten(net.trainable_parameters())
    net.load_weights([(name, value + 0.1) for name, value in found], strict=False)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(tree_flatten(net.trainable_parameters())))
    config = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 1, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    ours = model()
    load_adapter(ours, tmp_path)
    np.testing.assert_array_equal(np.array(ours(IDS)), np.array(net(IDS)))


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_switched_off_the_model_is_its_base_to_the_bit_and_on_again_afterwards(method: Any) -> None:
    net = adapted(MethodOptions(method, targets=("q_proj", "embed_tokens")))
    before = np.array(net(IDS))
    with adapter_off(net):
        np.testing.assert_array_equal(np.array(net(IDS)), np.array(model()(IDS)))
    np.testing.assert_array_equal(np.array(net(IDS)), before)


def test_qlora_trains_on_a_packed_base_and_refuses_a_plain_one() -> None:
    with pytest.raises(InvalidRequestError, match="isn't quantized"):
        apply(model(), MethodOptions("qlora"))
    net = model()
    nn.quantize(net, group_size=32, bits=4)
    names = apply(net, MethodOptions("qlora", targets=("q_proj",), num_layers=1))
    assert names == [f"model.layers.1.self_attn.q_proj.{leaf}" for leaf in ("lora_a", "lora_b")]
    packed = model()
    nn.quantize(packed, group_size=32, bits=4)
    with pytest.raises(InvalidRequestError, match="base is quantized"):
        apply(packed, MethodOptions("full"))


def test_a_target_that_matches_nothing_is_named_with_what_there_is() -> None:
    with pytest.raises(InvalidRequestError, match=r"'w_pack' matches no layer; there are .*q_proj"):
        apply(model(), MethodOptions(targets=("q_proj", "w_pack")))
    with pytest.raises(InvalidRequestError, match="num_layers is 3; the model has 2"):
        apply(model(), MethodOptions(num_layers=3))


def test_an_adapter_for_another_base_names_the_tensor(tmp_path: Path) -> None:
    options = MethodOptions(rank=4, targets=("q_proj",))
    save_adapter(tmp_path, adapted(options), options, {})
    with pytest.raises(ModelFileError, match=r"q_proj\.lora_a is \(64, 4\); the model has \(128, 4\)"):
        load_adapter(model(hidden_size=128), tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelFileError, match=r"adapters\.safetensors"):
        load_adapter(model(), tmp_path)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_dora_on_a_base_of_odd_bits_is_refused_and_lora_is_not(bits: int) -> None:
    packed = model()
    nn.quantize(packed, group_size=32, bits=bits)
    with pytest.raises(InvalidRequestError, match=f"is packed in {bits} bits"):
        apply(packed, MethodOptions("dora"))
    assert apply(packed, MethodOptions("qlora"))
