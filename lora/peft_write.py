"""PEFT's adapters written: with the ranks and alphas that an imported one came with, where it says so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.convert.card import CARD
from mlxinfer.convert.export.names import FAMILIES, expert_name
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.lora import bases
from mlxinfer.lora.peft import (
    NOTE,
    PREFIX,
    STACKED,
    WEIGHTS,
    alpha_of,
    check_family,
    rank_axis,
    scaled,
    with_rank,
)
from mlxinfer.lora.peft_config import CONFIG, config_text
from mlxinfer.lora.places import new_folder, put_tensors, put_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.lora.adapter import Adapter


def write_peft(destination: Path, adapter: Adapter, model: nn.Module, *, base: str = "", card: str = "") -> int:
    """Write `adapter`, which is for `model`, as a folder that PEFT loads; returns its tensors' bytes.

    `base` is what PEFT will load it onto, `card` its README.md.

    Experts are written one by one, as transformers had them before it stacked them; PEFT converts them as it loads.
    Raises UnsupportedModelError, InvalidRequestError where something is in the way, and ExportError.
    """
    options = adapter.options
    if options.method == "full":
        raise UnsupportedModelError("a full fine-tuning is no adapter; make a model of it with mlxinfer lora fuse")
    check_family(model)
    layers = bases.layers_of(model)
    # Where PEFT stacks experts it doubles their ranks, and makes up for that in alpha / rank only.
    stacked = any(bases.kind_of(layers[path]) == "SwitchLinear" for path in options.targets)
    rslora = options.method == "rslora" and not stacked
    own = {path: found for path in options.targets if (found := _own_of(adapter, path, layers[path]))}
    tensors: dict[str, mx.array] = {}
    paths: list[str] = []
    for path in options.targets:
        rank, scale = own.get(path, (options.rank, options.scale))
        arrays = {leaf: adapter.weights[f"{path}.{leaf}"] for leaf in ("lora_a", "lora_b")}
        if rank != options.rank:
            arrays = {leaf: with_rank(array, rank_axis(layers[path], leaf), rank) for leaf, array in arrays.items()}
        arrays["lora_b"] = scaled(arrays["lora_b"], options.scale / scale if scale != options.scale else 1.0)
        if options.method == "dora":
            arrays["m"] = adapter.weights[f"{path}.m"]
        for name, parts in _as_peft(path, arrays, layers[path], model):
            paths.append(name)
            tensors |= {f"{PREFIX}{name}.{part}": mx.contiguous(array) for part, array in parts.items()}
    text = config_text(
        base,
        options.rank,
        alpha_of(options.scale, options.rank, rslora=rslora),
        options.dropout,
        _targets(paths, model) if len(paths) == len(options.targets) else paths,
        rslora=rslora,
        dora=options.method == "dora",
        ranks={path: rank for path, (rank, _) in own.items() if rank != options.rank},
        alphas={path: alpha_of(scale, rank, rslora=rslora) for path, (rank, scale) in own.items()},
    )
    total = sum(array.nbytes for array in tensors.values())
    with new_folder(destination, total) as work:
        put_tensors(work / WEIGHTS, tensors, {"format": "pt"})
        put_text(work / CONFIG, text)
        if card:
            put_text(work / CARD, card)
    return total


def _own_of(adapter: Adapter, path: str, layer: nn.Module) -> tuple[int, float] | None:
    """(rank, scale) that a layer had in PEFT, unless it has been trained since to more than that rank."""
    noted = adapter.notes.get(NOTE)
    found: Any = noted.get(path) if isinstance(noted, dict) else None
    if not isinstance(found, list) or len(found) != 2 or bases.kind_of(layer) == "SwitchLinear":
        return None
    rank, scale = found
    if type(rank) is not int or not 1 <= rank <= adapter.options.rank or not isinstance(scale, float):
        return None
    if not 0 < scale < math.inf:
        return None
    for leaf in ("lora_a", "lora_b"):
        array, axis = adapter.weights[f"{path}.{leaf}"], rank_axis(layer, leaf)
        beyond = mx.take(array, mx.arange(rank, adapter.options.rank), axis)
        if rank < adapter.options.rank and mx.any(beyond != 0).item():
            return None
    return rank, scale


def _as_peft(
    path: str, arrays: Mapping[str, mx.array], layer: nn.Module, model: nn.Module
) -> Iterator[tuple[str, dict[str, mx.array]]]:
    """(path in transformers, PEFT's tensors) of one layer of mlx-lm's."""
    kind = bases.kind_of(layer)
    if kind == "SwitchLinear":
        experts = FAMILIES[bases.model_type_of(model)].experts if bases.model_type_of(model) in FAMILIES else None
        pattern = expert_name(f"{path}.weight", experts) if experts else None
        if pattern is None:
            raise UnsupportedModelError(f"{path}: PEFT has no form for adapters of these experts")
        for e in range(arrays["lora_a"].shape[0]):
            name = pattern.removesuffix(".weight").replace("{e}", str(e))
            yield name, {f"{part}.weight": arrays[leaf][e] for leaf, part in STACKED.items()}
    elif kind == "Embedding":
        if "m" in arrays:
            raise UnsupportedModelError(f"{path}: DoRA on an embedding is computed otherwise by PEFT")
        yield path, {"lora_embedding_A": arrays["lora_a"].T, "lora_embedding_B": arrays["lora_b"].T}
    else:
        parts = {"lora_A.weight": arrays["lora_a"].T, "lora_B.weight": arrays["lora_b"].T}
        yield path, parts | ({"lora_magnitude_vector": arrays["m"]} if "m" in arrays else {})


def _targets(paths: list[str], model: nn.Module) -> list[str]:
    """The last names of layers, as PEFT's configs have them, where that says the same as the whole paths."""

    def ends(names: Iterable[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in names:
            found.setdefault(name.rpartition(".")[2], set()).add(name)
        return found

    wanted, there = ends(paths), ends(bases.layers_of(model))
    return sorted(wanted) if all(there[end] == names for end, names in wanted.items()) else sorted(paths)
