"""gpt-oss in floats: experts in transformers' layout become mlx-lm's, and the model computes the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.convert import ConvertOptions, Packing, convert
from mlxinfer.errors import ModelFileError
from mlxinfer.formats.safetensors import shard_files
from tests.unit.convert.sources.checkpoints import Tensors, bf16, bf16_values, opened, write_folder

if TYPE_CHECKING:
    from pathlib import Path

CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 10000,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}
TOKENS = [[5, 9, 31, 7, 12, 88, 3, 61, 40, 2, 77]]


def checkpoint() -> tuple[Tensors, dict[str, mx.array]]:
    """The tensors of a file as transformers writes it, and the same weights as mlx-lm's own parameters.

    Square experts: no shape tells that they are transposed.
    """
    rng = np.random.default_rng(11)
    blank, _ = upstream.blank_model(CONFIG)
    parameters: Any = tree_flatten(blank.parameters())
    shapes = {name: tuple(value.shape) for name, value in parameters}
    own: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        own[name] = bf16(rng.normal(size=shape) * 0.2 + ("norm" in name))[1]
    stored: dict[str, np.ndarray] = {}
    for name, values in own.items():
        path, _, last = name.rpartition(".")
        if ".experts." not in name:
            stored[name] = values
        elif path.endswith("down_proj"):
            stored[path if last == "weight" else f"{path}_bias"] = (
                values.swapaxes(-1, -2) if values.ndim == 3 else values
            )
        elif path.endswith("gate_proj"):
            up = own[name.replace("gate_proj", "up_proj")]
            both = np.stack([values, up], axis=2).reshape(len(up), -1, *up.shape[2:])
            fused = path.replace("gate_proj", "gate_up_proj")
            stored[fused if last == "weight" else f"{fused}_bias"] = both.swapaxes(-1, -2) if both.ndim == 3 else both
    tensors: Tensors = {name: ("BF16", np.ascontiguousarray(values)) for name, values in stored.items()}
    return tensors, {name: mx.array(bf16_values(values)) for name, values in own.items()}


def logits(folder: Path) -> mx.array:
    model, _ = upstream.load_folder(folder, shard_files(folder))
    return model(mx.array(TOKENS))


def test_experts_in_transformers_layout_compute_what_mlx_lms_do(tmp_path: Path) -> None:
    tensors, own = checkpoint()
    source = opened(write_folder(tmp_path / "in", tensors, **CONFIG), "safetensors")
    outcome = convert(source, tmp_path / "out", ConvertOptions(dtype="float32"))
    written: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert written.keys() == own.keys()
    for name, value in own.items():
        assert mx.array_equal(written[name], value).item(), name
    assert {d.handling for d in outcome.decisions} == {"exact"}
    up = next(d for d in outcome.decisions if d.name.endswith("experts.up_proj.weight"))
    assert up.note == f"every second column of {up.source[0]}, transposed"
    reference = upstream.build_model(CONFIG, own)(mx.array(TOKENS))
    difference, largest = (np.abs(np.array(a)).max() for a in (logits(tmp_path / "out") - reference, reference))
    assert difference <= 1e-5 * largest


def test_experts_are_packed_as_mlx_packs_its_own(tmp_path: Path) -> None:
    tensors, own = checkpoint()
    source = opened(write_folder(tmp_path / "in", tensors, **CONFIG))
    convert(source, tmp_path / "out", ConvertOptions(dtype="float32", packing=Packing(4, 32)))
    written: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        words, scales, biases = mx.quantize(own[f"{path}.weight"], 32, 4)
        for part, expected in (("weight", words), ("scales", scales), ("biases", biases)):
            assert mx.array_equal(written[f"{path}.{part}"], expected).item(), (name, part)
    packed = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    assert packed["bits"] == 4


def test_a_layout_that_config_json_contradicts_is_refused(tmp_path: Path) -> None:
    tensors, _ = checkpoint()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    kind, values = tensors[name]
    tensors[name] = kind, np.ascontiguousarray(values.swapaxes(-1, -2))
    with pytest.raises(ModelFileError, match=r"gate_up_proj' has shape \(4, 128, 64\).*\[experts, inputs, outputs\]"):
        opened(write_folder(tmp_path, tensors, **CONFIG))


def test_folders_that_mlx_lm_has_sanitized_are_left_alone(tmp_path: Path) -> None:
    _, own = checkpoint()
    tensors: Tensors = {name: ("F32", np.array(value)) for name, value in own.items()}
    convert(opened(write_folder(tmp_path / "in", tensors, **CONFIG)), tmp_path / "out", ConvertOptions())
    written: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert all(mx.array_equal(written[name], value).item() for name, value in own.items())
