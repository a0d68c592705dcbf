"""Adapters as one GGUF file, as llama.cpp loads them beside a model of its own (`--lora`), and back.

llama.cpp multiplies by alpha / rank and holds A as [rank, in] and B as [out, rank], experts stacked in front. Where it
interleaves the rows of q and k, those of B are interleaved too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from mlxinfer.convert.export.gguf import rope_order
from mlxinfer.convert.export.gguf_config import target_of
from mlxinfer.convert.export.gguf_file import f32, string, write_gguf
from mlxinfer.convert.export.names import FAMILIES, expert_name
from mlxinfer.convert.export.writing import Meter, Output, appearing, check_destination, synced
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf import read_gguf
from mlxinfer.formats.gguf.blocks import float_rows
from mlxinfer.lora import bases
from mlxinfer.lora.adapter import MAX_NAMED, misfits, not_finite
from mlxinfer.lora.peft import check_family, rank_axis, uniform
from mlxinfer.lora.peft_config import PeftConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.convert.export.gguf_config import Target
    from mlxinfer.formats.gguf import GGUFFile, GGUFTensor
    from mlxinfer.lora.adapter import Adapter

LEAVES = ("lora_a", "lora_b")


def write_adapter_gguf(destination: Path, adapter: Adapter, model: nn.Module, config: Mapping[str, Any]) -> int:
    """Write `adapter`, for the base `model` with `config`, as the file `destination`. Returns its tensors' bytes.

    Raises UnsupportedModelError for DoRA, full fine-tunings, embeddings and architectures that llama.cpp or this
    program lacks; InvalidRequestError where something is in the way; ExportError.
    """
    options = adapter.options
    if options.method in ("dora", "full"):
        raise UnsupportedModelError(
            f"llama.cpp has no adapters of the kind {options.method}; fuse it (mlxinfer lora fuse) and export the model"
        )
    model_type = bases.model_type_of(model)
    target = target_of(model_type, str(destination))
    check_family(model)
    outputs: list[Output] = []
    for path, name in _names(options.targets, model, target).items():
        order = _order(path, model, config) if target.interleaved else None
        outputs += [_output(f"{name}.{leaf}", array) for leaf, array in _as_llama(adapter, path, model, order).items()]
    metadata = {
        "general.architecture": string(MODEL_ARCH_NAMES[target.arch]),
        "general.type": string("adapter"),
        "general.name": string(destination.stem),
        "adapter.type": string("lora"),
        "adapter.lora.alpha": f32(options.scale * options.rank),
    }
    total = sum(output.nbytes for output in outputs)
    check_destination(destination, total)
    with appearing(destination, folder=False) as work, synced(work) as file:
        write_gguf(file, metadata, outputs, Meter(total))
    return total


def _names(paths: tuple[str, ...], model: nn.Module, target: Target) -> dict[str, str]:
    """llama.cpp's name of each layer's weight, by our path. Raises UnsupportedModelError for one that it lacks."""
    known = _known_names(model, target)
    layers = bases.layers_of(model)
    for path in paths:
        if bases.kind_of(layers[path]) == "Embedding":
            raise UnsupportedModelError(
                f"{path}: llama.cpp applies an adapter of the embedding only where it looks tokens up; fuse it instead"
            )
        if path not in known:
            raise UnsupportedModelError(f"{path}: llama.cpp's {target.arch.name} has no tensor for it")
    return {path: known[path] for path in paths}


def _known_names(model: nn.Module, target: Target) -> dict[str, str]:
    """llama.cpp's name of the weight of every layer that it knows, embeddings aside, by our path."""
    held: Any = model
    known = get_tensor_name_map(target.arch, len(held.layers))
    experts = FAMILIES[bases.model_type_of(model)].experts
    found: dict[str, str] = {}
    for path, layer in bases.layers_of(model).items():
        stack = expert_name(f"{path}.weight", experts) if experts else None
        published = stack.replace(".{e}", "").removesuffix(".weight") if stack else path
        name = known.get_name(published)
        if name is not None and bases.kind_of(layer) != "Embedding":
            found[path] = f"{name}.weight"
    return found


def _order(path: str, model: nn.Module, config: Mapping[str, Any]) -> np.ndarray | None:
    """Of the rows of q and k; None for other layers."""
    last = path.rpartition(".")[2]
    if last not in ("q_proj", "k_proj"):
        return None
    rows = bases.weight_shape(bases.layers_of(model)[path])[0]
    heads = config.get("num_attention_heads")
    if last == "k_proj":
        heads = config.get("num_key_value_heads") or heads
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise ModelFileError(f"config.json: {heads!r:.40} heads don't divide the {rows} rows of {path} into pairs")
    return rope_order(rows, heads)


def _as_llama(adapter: Adapter, path: str, model: nn.Module, order: np.ndarray | None) -> dict[str, mx.array]:
    a, b = adapter.weights[f"{path}.lora_a"], adapter.weights[f"{path}.lora_b"]
    if bases.kind_of(bases.layers_of(model)[path]) == "SwitchLinear":
        return {"lora_a": a, "lora_b": b}
    b = b.T if order is None else b.T[mx.array(order)]
    return {"lora_a": a.T, "lora_b": b}


def _output(name: str, array: mx.array) -> Output:
    values = np.ascontiguousarray(np.array(array.astype(mx.float32)), "<f4")
    return Output(name, values.shape, "F32", values.nbytes, (), "exact", "", lambda: iter([values]))


def read_adapter_gguf(path: Path, model: nn.Module, config: Mapping[str, Any]) -> Adapter:
    """An adapter of llama.cpp's for the base `model` with `config`, as mlx-lm's.

    Raises ModelFileError that names every tensor that doesn't fit, UnsupportedModelError for other kinds of files.
    """
    file = read_gguf(path)
    kinds = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kinds != ("adapter", "lora"):
        raise UnsupportedModelError(f"{path}: general.type and adapter.type are {kinds!r:.80}; a LoRA adapter is read")
    target = target_of(bases.model_type_of(model), str(path))
    if file.architecture != MODEL_ARCH_NAMES[target.arch]:
        raise ModelFileError(f"{path} is for {file.architecture!r:.60}; the base is {MODEL_ARCH_NAMES[target.arch]!r}")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
        raise ModelFileError(f"{path}: adapter.lora.alpha is {alpha!r:.40}; a number from 0 is expected")
    found = _read_layers(file, model, config, target)
    layers = bases.layers_of(model)
    # Without an alpha llama.cpp scales by 1, whatever the rank.
    ranks = {own: arrays["lora_b"].shape[rank_axis(layers[own], "lora_b")] for own, arrays in found.items()}
    own_alphas = {} if alpha else {f"^{own}": float(rank) for own, rank in ranks.items()}
    return uniform(found, layers, PeftConfig(1, float(alpha), False, False, 0.0, own_alphas))


def _read_layers(
    file: GGUFFile, model: nn.Module, config: Mapping[str, Any], target: Target
) -> dict[str, dict[str, mx.array]]:
    layers = bases.layers_of(model)
    known = {f"{name}.{leaf}": (path, leaf) for path, name in _known_names(model, target).items() for leaf in LEAVES}
    wrong = [f"{name:.160} is for no layer of the base" for name in file.tensors if name not in known]
    found: dict[str, dict[str, mx.array]] = {}
    for name, tensor in file.tensors.items():
        if name in known:
            path, leaf = known[name]
            order = _order(path, model, config) if target.interleaved else None
            found.setdefault(path, {})[leaf] = _as_ours(tensor, leaf, order)
    for path, arrays in found.items():
        wrong += [f"{path} has no {leaf}" for leaf in LEAVES if leaf not in arrays]
        ranks = [array.shape[rank_axis(layers[path], leaf)] for leaf, array in arrays.items() if array.ndim > 1]
        shapes = bases.adapter_shapes(layers[path], min(ranks, default=1), dora=False)
        wrong += misfits(
            {f"{path}.{k}": v for k, v in arrays.items()}, {f"{path}.{k}": v for k, v in shapes.items()}, whole=False
        )
    wrong = wrong or not_finite({f"{path}.{k}": v for path, arrays in found.items() for k, v in arrays.items()})
    if wrong or not found:
        named = "; ".join(wrong[:MAX_NAMED]) or "it holds no tensor"
        raise ModelFileError(f"{file.path} doesn't go with this base, a {bases.model_type_of(model)}: {named}")
    return found


def _as_ours(tensor: GGUFTensor, leaf: str, order: np.ndarray | None) -> mx.array:
    values = float_rows(tensor, tensor.read()).reshape(tensor.shape)
    if len(tensor.shape) != 2:
        return mx.array(values)
    if leaf == "lora_b" and order is not None and len(order) == len(values):
        values = values[np.argsort(order)]
    return mx.array(np.ascontiguousarray(values.T))
