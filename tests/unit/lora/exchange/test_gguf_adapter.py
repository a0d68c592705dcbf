"""Adapters as GGUF: names, rows and scale as llama.cpp wants them, and back to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.convert.export.gguf_file import f32, string, write_gguf
from mlxinfer.convert.export.writing import Meter, Output
from mlxinfer.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import read_gguf
from mlxinfer.lora import MethodOptions, save_adapter
from mlxinfer.lora.adapter import Adapter, read_adapter
from mlxinfer.lora.gguf import read_adapter_gguf, write_adapter_gguf
from tests.unit.convert.export import models
from tests.unit.lora.exchange.made import adapt

if TYPE_CHECKING:
    from pathlib import Path


def made(tmp_path: Path, model_type: str, options: MethodOptions) -> tuple[Any, dict[str, Any], Adapter]:
    """(base, its config, an adapter for it)."""
    config = models.config(model_type)
    net = adapt(models.build(config), options)
    save_adapter(tmp_path / "adapter", net, options, {})
    base = models.build(config)
    return base, config, read_adapter(tmp_path / "adapter", base)


@pytest.mark.parametrize("method", ["lora", "rslora"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_an_adapter_goes_out_and_comes_back_to_the_bit(tmp_path: Path, model_type: str, method: Any) -> None:
    base, config, adapter = made(tmp_path, model_type, MethodOptions(method, rank=4, alpha=6.0))
    write_adapter_gguf(tmp_path / "a.gguf", adapter, base, config)
    back = read_adapter_gguf(tmp_path / "a.gguf", base, config)
    assert back.weights.keys() == adapter.weights.keys()
    assert all(mx.array_equal(back.weights[name], value).item() for name, value in adapter.weights.items())
    assert back.options.scale == pytest.approx(adapter.options.scale, rel=1e-7)


def test_the_file_says_what_llama_cpp_reads(tmp_path: Path) -> None:
    base, config, adapter = made(
        tmp_path, "llama", MethodOptions("rslora", rank=4, alpha=6.0, targets=("q_proj", "up_proj"))
    )
    write_adapter_gguf(tmp_path / "a.gguf", adapter, base, config)
    file = read_gguf(tmp_path / "a.gguf")
    assert file.metadata["general.type"] == "adapter"
    assert file.metadata["adapter.type"] == "lora"
    assert file.metadata["adapter.lora.alpha"] == adapter.options.scale * 4
    up = adapter.weights["model.layers.0.mlp.up_proj.lora_a"]
    assert np.array_equal(file.tensors["blk.0.ffn_up.weight.lora_a"].read().view("<f4"), np.array(up).T)
    q = np.array(adapter.weights["model.layers.1.self_attn.q_proj.lora_b"]).T
    stored = file.tensors["blk.1.attn_q.weight.lora_b"].read().view("<f4")
    half = q.shape[0] // config["num_attention_heads"] // 2
    assert np.array_equal(stored[:4], q[[0, half, 1, half + 1]])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (MethodOptions("dora", rank=4), "no adapters of the kind dora"),
        (MethodOptions("full"), "no adapters of the kind full"),
        (MethodOptions(rank=4, targets=("embed_tokens",)), "embed_tokens: llama.cpp applies"),
    ],
)
def test_what_llama_cpp_lacks_is_refused(tmp_path: Path, options: MethodOptions, said: str) -> None:
    base, config, adapter = made(tmp_path, "llama", options)
    with pytest.raises(UnsupportedModelError, match=said):
        write_adapter_gguf(tmp_path / "a.gguf", adapter, base, config)
    assert not (tmp_path / "a.gguf").exists()


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    base, config, adapter = made(tmp_path, "llama", MethodOptions(rank=4, targets=("q_proj",)))
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(InvalidRequestError, match="exists already"):
        write_adapter_gguf(tmp_path / "a.gguf", adapter, base, config)
    assert (tmp_path / "a.gguf").read_text() == "mine"


def test_an_adapter_of_another_base_names_every_tensor(tmp_path: Path) -> None:
    base, config, adapter = made(tmp_path, "llama", MethodOptions(rank=4, targets=("q_proj", "up_proj")))
    write_adapter_gguf(tmp_path / "a.gguf", adapter, base, config)
    other = models.config("llama", num_hidden_layers=1, intermediate_size=64)
    with pytest.raises(ModelFileError) as caught:
        read_adapter_gguf(tmp_path / "a.gguf", models.build(other), other)
    for problem in ("blk.1.attn_q.weight.lora_a is for no layer", "up_proj.lora_b is (4, 96); the model has (4, 64)"):
        assert problem in str(caught.value)
    with pytest.raises(ModelFileError, match="is for 'llama'; the base is 'qwen3'"):
        read_adapter_gguf(tmp_path / "a.gguf", models.build(models.config("qwen3")), models.config("qwen3"))


def write_by_hand(path: Path, *, alpha: float | None, ranks: dict[str, int], kind: str = "adapter") -> None:
    metadata = {
        "general.architecture": string("llama"),
        "general.type": string(kind),
        "adapter.type": string("lora"),
        **({} if alpha is None else {"adapter.lora.alpha": f32(alpha)}),
    }
    outputs: list[Output] = []
    for name, rank in ranks.items():
        for leaf, shape in (("lora_a", (rank, 64)), ("lora_b", (96, rank))):
            data = np.ones(shape, "<f4")
            outputs.append(
                Output(f"{name}.{leaf}", shape, "F32", data.nbytes, (), "exact", "", lambda data=data: iter([data]))
            )
    with path.open("wb") as file:
        write_gguf(file, metadata, outputs, Meter(0))


@pytest.mark.parametrize(("alpha", "factors"), [(8.0, (8 / 4, 8 / 2)), (None, (1.0, 1.0)), (0.0, (1.0, 1.0))])
def test_ranks_that_differ_and_a_missing_alpha_scale_as_in_llama_cpp(
    tmp_path: Path, alpha: float | None, factors: tuple[float, float]
) -> None:
    config = models.config("llama")
    write_by_hand(tmp_path / "a.gguf", alpha=alpha, ranks={"blk.0.ffn_up.weight": 4, "blk.1.ffn_up.weight": 2})
    adapter = read_adapter_gguf(tmp_path / "a.gguf", models.build(config), config)
    for layer, (factor, rank) in enumerate(zip(factors, (4, 2), strict=True)):
        a, b = (adapter.weights[f"model.layers.{layer}.mlp.up_proj.{leaf}"] for leaf in ("lora_a", "lora_b"))
        assert np.all(adapter.options.scale * np.array(a @ b) == factor * rank)


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    config = models.config("llama")
    write_by_hand(tmp_path / "a.gguf", alpha=1.0, ranks={"blk.0.ffn_up.weight": 4}, kind="model")
    with pytest.raises(UnsupportedModelError, match=r"general\.type"):
        read_adapter_gguf(tmp_path / "a.gguf", models.build(config), config)
