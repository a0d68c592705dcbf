"""PEFT's adapters read: LoRA, rsLoRA and DoRA, on linear layers, embeddings and experts.

PEFT holds A as [rank, in] and B as [out, rank], mlx-lm both the other way round; of experts PEFT has one pair each.
mlx-lm knows one rank and one scale for all layers: smaller ranks are padded with zeros and other scales go into B.
The way back is peft_write.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.convert.export.names import FAMILIES
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.lora import bases
from mlxinfer.lora.adapter import FLOATS, MAX_NAMED, Adapter, not_finite
from mlxinfer.lora.checkpoint import read_tensors
from mlxinfer.lora.methods import MethodOptions
from mlxinfer.lora.peft_config import read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.lora.peft_config import PeftConfig

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_PADDED_BYTES = 16 << 30
NOTE = "peft"
"""Under this note an imported adapter says what its layers' own ranks and alphas were."""
LEFT_OUT = "left_out"
"""Tensors of a PEFT adapter that are the base's own."""
_NAME = re.compile(
    r"base_model\.model\.(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.weight)?"
)
_BASE = re.compile(r"base_model\.model\.(?P<path>.+)\.base_layer\.(?:weight|bias)")
_PARTS = {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}


def read_peft(folder: Path, model: nn.Module) -> Adapter:
    """The adapter in `folder` for `model`, a base with or without weights.

    Raises ModelFileError that names every tensor that doesn't fit, UnsupportedModelError for what mlx-lm has no form
    for: other kinds of adapters, layers saved whole, DoRA on embeddings, families whose names differ.
    """
    config = read_config(folder)
    check_family(model)
    path = folder / WEIGHTS
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise UnsupportedModelError(f"{folder} holds adapter_model.bin, a pickle, which is not read; save it anew")
    tensors = read_tensors(path)
    if not tensors:
        raise ModelFileError(f"{path} holds no tensor")
    wrong: list[str] = []
    layers = bases.layers_of(model)
    tensors, copies = _without_copies(tensors, layers, wrong)
    parts = _by_layer(tensors, model, config, wrong)
    found: dict[str, dict[str, mx.array]] = {}
    for name, held in parts.items():
        if problems := list(_problems(name, held, layers[name], config)):
            wrong += problems
        else:
            found[name] = _as_mlx(held, layers[name])
    wrong = wrong or not_finite(tensors)
    if wrong:
        named = "; ".join(wrong[:MAX_NAMED]) + (
            f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        )
        raise ModelFileError(f"{path} doesn't go with this base, a {bases.model_type_of(model)}: {named}")
    adapter = uniform(found, layers, config)
    return replace(adapter, notes={**adapter.notes, LEFT_OUT: copies}) if copies else adapter


def _without_copies(
    tensors: Mapping[str, mx.array], layers: Mapping[str, nn.Module], wrong: list[str]
) -> tuple[dict[str, mx.array], list[str]]:
    """The rest, and the names of the base's own embeddings and head, which PEFT saves beside their adapters."""
    copies = {name: match["path"] for name in tensors if (match := _BASE.fullmatch(name))}
    for name, path in copies.items():
        shape = bases.weight_shape(layers[path]) if path in layers else None
        if name.endswith(".weight") and tensors[name].shape != shape:
            wrong.append(f"{name:.160} is {tensors[name].shape}; the base has {shape}")
    return {name: value for name, value in tensors.items() if name not in copies}, sorted(copies)


def check_family(model: nn.Module) -> None:
    """Raises UnsupportedModelError where mlx-lm's names may differ from those that PEFT sees in transformers."""
    model_type = bases.model_type_of(model)
    # Without a `sanitize`, published tensors are loaded as they are.
    if model_type not in FAMILIES and hasattr(model, "sanitize"):
        raise UnsupportedModelError(
            f"adapters of {model_type!r:.60} can't be exchanged with PEFT: what mlx-lm did to the names and layouts of "
            f"this architecture is not known here; known: {', '.join(sorted(FAMILIES))}"
        )


_Parts = dict[tuple[int | None, str], mx.array]
"""Of one layer of mlx-lm's: (expert or None, lora_A, lora_B or lora_magnitude_vector) → tensor."""


def _by_layer(
    tensors: Mapping[str, mx.array], model: nn.Module, config: PeftConfig, wrong: list[str]
) -> dict[str, _Parts]:
    layers = bases.layers_of(model)
    experts = _expert_pattern(model)
    found: dict[str, _Parts] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            wrong.append(f"{name:.160} is no part of a LoRA or DoRA layer")
            continue
        path, expert = match["path"], None
        if path not in layers and experts and (one := experts.fullmatch(path)):
            path, expert = _stack_of(one, model), int(one["e"])
        if path not in layers:
            wrong.append(f"{name:.160} is for a layer that the base doesn't have")
        elif tensor.dtype not in FLOATS:
            wrong.append(f"{name} is {tensor.dtype}; floats are expected")
        else:
            found.setdefault(path, {})[expert, _PARTS.get(match["part"], match["part"])] = tensor
    return found


def _expert_pattern(model: nn.Module) -> re.Pattern[str] | None:
    family = FAMILIES.get(bases.model_type_of(model))
    if family is None or family.experts is None:
        return None
    single = re.escape(family.experts.single).replace(r"\{e\}", r"(?P<e>\d{1,6})")
    return re.compile(rf"(?P<layer>model\.layers\.\d+)\.{single}\.(?P<projection>\w+)")


def _stack_of(match: re.Match[str], model: nn.Module) -> str:
    experts = FAMILIES[bases.model_type_of(model)].experts
    assert experts is not None
    ours = {published: own for own, published in experts.projections.items()}
    return f"{match['layer']}.{experts.stack}.{ours.get(match['projection'], match['projection'])}"


def _problems(path: str, held: _Parts, layer: nn.Module, config: PeftConfig) -> Iterator[str]:
    """What of a layer is missing or of another shape than the base's."""
    *lead, rows, columns = bases.weight_shape(layer)
    kind = bases.kind_of(layer)
    if config.dora and kind != "Linear":
        yield f"{path} is DoRA on a layer of the kind {kind}, which mlx-lm computes otherwise or not at all"
        return
    experts = range(lead[0]) if lead else (None,)
    first, last = (rows, columns) if kind == "Embedding" else (columns, rows)
    ranks = {tensor.shape[0] for (_, part), tensor in held.items() if part == "lora_A" and tensor.ndim == 2}
    rank = min(ranks, default=config.rank)
    if config.one_rank and rank != config.rank:
        yield f"{path}.lora_A is of rank {rank}; adapter_config.json has r {config.rank} and no rank_pattern"
    wanted = {"lora_A": (rank, first), "lora_B": (last, rank)} | (
        {"lora_magnitude_vector": (rows,)} if config.dora else {}
    )
    expected = {(expert, part): shape for expert in experts for part, shape in wanted.items()}
    for (expert, part), shape in expected.items():
        where = f"{path}.{part}" + ("" if expert is None else f" of expert {expert}")
        if (expert, part) not in held:
            yield f"{where} is missing"
        elif held[expert, part].shape != shape or 0 in shape:
            yield f"{where} is {held[expert, part].shape}; the base has {shape}"
    for expert, part in held.keys() - expected.keys():
        yield f"{path}.{part} " + ("has no use here" if expert is None else f"of expert {expert} has no use here")


def _as_mlx(held: _Parts, layer: nn.Module) -> dict[str, mx.array]:
    if bases.kind_of(layer) == "SwitchLinear":
        experts = range(bases.weight_shape(layer)[0])
        return {leaf: mx.stack([held[e, part] for e in experts]) for leaf, part in STACKED.items()}
    found = {"lora_a": held[None, "lora_A"].T, "lora_b": held[None, "lora_B"].T}
    magnitude = held.get((None, "lora_magnitude_vector"))
    return found if magnitude is None else found | {"m": magnitude}


STACKED = {"lora_a": "lora_A", "lora_b": "lora_B"}
_RANK_AXES = {"Linear": {"lora_a": 1, "lora_b": 0}, "SwitchLinear": {"lora_a": 1, "lora_b": 2}}
_RANK_AXES["Embedding"] = _RANK_AXES["Linear"]


def uniform(found: Mapping[str, dict[str, mx.array]], layers: Mapping[str, nn.Module], config: PeftConfig) -> Adapter:
    """An adapter of one rank and one scale: the highest rank, and the scale that most layers have.

    `found` has lora_a, lora_b and m of each layer as mlx-lm lays them out, of any rank. Raises ModelFileError for
    ranks that are too far apart.
    """
    ranks = {path: arrays["lora_b"].shape[rank_axis(layers[path], "lora_b")] for path, arrays in found.items()}
    scales = {path: config.scale_of(path, rank) for path, rank in ranks.items()}
    rank, values = max(ranks.values()), list(scales.values())
    padded = sum(array.nbytes // ranks[path] * rank for path, arrays in found.items() for array in arrays.values())
    if padded > MAX_PADDED_BYTES and len(set(ranks.values())) > 1:
        raise ModelFileError(
            f"ranks from {min(ranks.values())} to {rank}: mlx-lm has one for all layers, and padded to that the "
            f"adapter takes {padded / 1e9:.1f} GB; at most {MAX_PADDED_BYTES / 1e9:.1f} are made"
        )
    scale = max(values, key=lambda value: (value > 0, values.count(value), value))
    weights: dict[str, mx.array] = {}
    for path, arrays in found.items():
        for leaf, array in arrays.items():
            if leaf == "lora_b":
                array = scaled(array, scales[path] / scale if scales[path] != scale else 1.0)
            if leaf != "m":
                array = with_rank(array, rank_axis(layers[path], leaf), rank)
            weights[f"{path}.{leaf}"] = mx.contiguous(array)
    method = "dora" if config.dora else "rslora" if config.rslora else "lora"
    alpha = alpha_of(scale, rank, rslora=method == "rslora")
    options = MethodOptions(method, rank, alpha, config.dropout, tuple(found))
    own = {path: [ranks[path], scales[path]] for path in found if (ranks[path], scales[path]) != (rank, scale)}
    return Adapter(options, weights, {NOTE: own} if own else {})


def rank_axis(layer: nn.Module, leaf: str) -> int:
    """Which axis of lora_a or lora_b counts the rank."""
    return _RANK_AXES[bases.kind_of(layer)][leaf]


def with_rank(array: mx.array, axis: int, rank: int) -> mx.array:
    """Padded with zeros to `rank`, or cut to it."""
    if (missing := rank - array.shape[axis]) > 0:
        return mx.pad(array, [(0, missing if i == axis else 0) for i in range(array.ndim)])
    return mx.take(array, mx.arange(rank), axis) if missing < 0 else array


def scaled(array: mx.array, factor: float) -> mx.array:
    """Exact for a power of 2; otherwise in float32."""
    if factor == 1.0:
        return array
    exact = math.frexp(factor)[0] == 0.5
    return (array if exact else array.astype(mx.float32)) * factor


def alpha_of(scale: float, rank: int, *, rslora: bool) -> float:
    """The alpha that makes `scale`, a whole number if one does."""
    divisor = math.sqrt(rank) if rslora else rank
    whole = float(round(scale * divisor))
    return whole if whole / divisor == scale else scale * divisor
