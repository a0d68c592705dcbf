"""Adapters of random numbers, made by mlx-lm's own classes, and mlx-lm's own text with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from mlxinfer import upstream
from mlxinfer.formats.safetensors import shard_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

QV = ("self_attn.q_proj", "self_attn.v_proj")
MLP = ("mlp.down_proj", "self_attn.o_proj")


def write_adapter(
    folder: Path, base: Path, *, seed: int, kind: str = "lora", rank: int = 4, keys: Sequence[str] | None = QV,
    num_layers: int = -1, size: float = 0.1, **changes: Any,
) -> Path:  # fmt: skip
    """Write an adapter for the model in `base`, strong enough to change its text; `changes` go into its config."""
    model: Any = upstream.load_folder(base, shard_files(base))[0]
    parameters = {"rank": rank, "scale": 4.0, "dropout": 0.1, "keys": None if keys is None else list(keys)}
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights: dict[str, mx.array] = {}
    flat: Any = tree_flatten(model.parameters())
    for name, value in flat:
        if name.endswith((".lora_a", ".lora_b")):
            weights[name] = mx.random.normal(value.shape) * size
        elif name.endswith(".m"):
            weights[name] = value * mx.random.uniform(0.8, 1.2, value.shape)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def mlx_lm_tokens(base: Path, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy, as mlx-lm itself loads and runs the two."""
    model: Any = upstream.load_folder(base, shard_files(base))[0]
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.eval()
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count)]
