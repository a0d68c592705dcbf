"""Parameters that mlx-lm has in one piece and llama.cpp in several, or the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.gguf.parameters import Parameter, between, halves_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlxinfer.formats.gguf.config import Config
    from mlxinfer.formats.gguf.reader import GGUFFile, GGUFTensor


def block_tensor(file: GGUFFile, layer: int, name: str) -> GGUFTensor:
    found = file.tensors.get(f"blk.{layer}.{name}")
    if found is None:
        raise ModelFileError(f"{file.path}: the tensor blk.{layer}.{name} is missing")
    return found


def check(tensor: GGUFTensor, shape: tuple[int, ...]) -> GGUFTensor:
    if tensor.shape != shape:
        raise ModelFileError(
            f"{tensor.path}: the tensor {tensor.name} has shape {tensor.shape}; its metadata ask for {shape}"
        )
    return tensor


def internlm2_parameters(file: GGUFFile, config: Config) -> Iterator[Parameter]:
    """wqkv: for each key head the queries that share it, the key and the value. q and k come interleaved."""
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q_rows, kv_rows, hidden = heads * head_dim, kv_heads * head_dim, config["hidden_size"]

    def order(rows: int) -> np.ndarray:
        index = np.arange(rows)
        q = index[:q_rows][halves_apart(heads)(q_rows)].reshape(kv_heads, -1)
        k = index[q_rows : q_rows + kv_rows][halves_apart(kv_heads)(kv_rows)].reshape(kv_heads, -1)
        return np.concatenate([q, k, index[q_rows + kv_rows :].reshape(kv_heads, -1)], axis=1).reshape(-1)

    for layer in range(config["num_hidden_layers"]):
        tensors = tuple(
            check(block_tensor(file, layer, f"attn_{part}.weight"), (rows, hidden))
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        )
        name = f"model.layers.{layer}.attention.wqkv.weight"
        yield Parameter(name, (q_rows + 2 * kv_rows, hidden), tensors, order, note="q, k and v joined by heads")


def split_qkv(file: GGUFFile, config: Config, path: Callable[[int, str], str]) -> Iterator[Parameter]:
    """q, k and v out of attn_qkv, in the layers that have it. `path`: of layer and "q", "k" or "v"."""
    head_dim, hidden = config["head_dim"], config["hidden_size"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    for layer in range(config["num_hidden_layers"]):
        for kind in ("weight", "bias"):
            tensor = file.tensors.get(f"blk.{layer}.attn_qkv.{kind}")
            if tensor is None:
                continue
            rest = (hidden,) if kind == "weight" else ()
            check(tensor, (q + 2 * kv, *rest))
            for part, start, stop in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
                name = f"{path(layer, part)}.{kind}"
                yield Parameter(name, (stop - start, *rest), (tensor,), between(start, stop), note="a part of attn_qkv")


def phi2_parameters(file: GGUFFile, config: Config) -> Iterator[Parameter]:
    return split_qkv(file, config, lambda layer, part: f"model.layers.{layer}.self_attn.{part}_proj")
