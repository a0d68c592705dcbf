"""What an adapter says of its base: the architecture, and the shapes of the layers that it touches."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer import upstream
from mlxinfer.convert import open_source
from mlxinfer.errors import ModelFileError
from mlxinfer.lora.methods import adaptable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import mlx.nn as nn


@dataclass(frozen=True, slots=True)
class Base:
    """A base for names and shapes."""

    model: nn.Module
    """Unquantized, and none of its weights read."""
    config: Mapping[str, Any]
    """Its config.json, of a GGUF file what that stands for."""


def open_base(path: Path) -> Base:
    """The base in a folder or a GGUF file. Raises ModelNotFoundError, ModelFileError or UnsupportedModelError."""
    with contextlib.closing(open_source(path)) as source:
        return Base(upstream.empty_model(source.config), source.config)


def model_type_of(model: nn.Module) -> str:
    """The architecture as config.json names it."""
    held: Any = model
    return str(getattr(held, "model_type", None) or held.args.model_type)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """What an adapter fits, or has, by path: the layer of the base itself."""
    modules = dict(model.named_modules())
    adapted = {path: held for path, held in modules.items() if "lora_a" in held}
    inner: dict[str, Any] = {
        path: held["linear" if "linear" in held else "embedding"] for path, held in adapted.items()
    }
    plain = {
        path: module
        for path, module in modules.items()
        if adaptable(module) and path.rpartition(".")[0] not in adapted and path not in adapted
    }
    return inner | plain


def kind_of(layer: nn.Module) -> str:
    """Linear, SwitchLinear (the experts of a layer) or Embedding."""
    return type(layer).__name__.removeprefix("Quantized")


def weight_shape(layer: nn.Module) -> tuple[int, ...]:
    """Of the floats: [rows, columns], of experts [experts, rows, columns]."""
    held: Any = layer
    *lead, columns = held.weight.shape
    return (*lead, columns * 32 // held.bits if "scales" in held else columns)


def adapter_shapes(layer: nn.Module, rank: int, *, dora: bool) -> dict[str, tuple[int, ...]]:
    """The arrays of mlx-lm's adapter layer around `layer`."""
    *lead, rows, columns = weight_shape(layer)
    kind = kind_of(layer)
    if kind == "SwitchLinear":
        return {"lora_a": (*lead, rank, columns), "lora_b": (*lead, rows, rank)}
    first, last = (rows, columns) if kind == "Embedding" else (columns, rows)
    shapes = {"lora_a": (first, rank), "lora_b": (rank, last)}
    return shapes | ({"m": (rows,)} if dora else {})


def fingerprint(model: nn.Module, paths: Iterable[str]) -> dict[str, Any]:
    """For the config of an adapter of `paths`: an adapter for another base is named as such by it."""
    layers = layers_of(model)
    shapes = {path: _shape(weight_shape(layers[path])) for path in sorted(paths)}
    return {"model_type": model_type_of(model), "layers": shapes}


def differences(record: object, model: nn.Module, where: str) -> list[str]:
    """How `model` differs from the base of which `fingerprint` made `record`. Raises ModelFileError for no record."""
    layers: Any = record.get("layers") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(layers, dict):
        raise ModelFileError(f"{where} is {record!r:.80}; an object with model_type and layers is expected")
    found: list[str] = []
    if (wanted := record.get("model_type")) != (own := model_type_of(model)):
        found.append(f"its base is {wanted!r:.60}, this model is {own!r}")
    here = layers_of(model)
    return found + [problem for path, shape in layers.items() if (problem := _difference(path, shape, here))]


def _difference(path: str, shape: object, here: Mapping[str, nn.Module]) -> str | None:
    if path not in here:
        return f"{path:.160} is no layer of this model"
    own = _shape(weight_shape(here[path]))
    return None if shape == own else f"{path} has the shape {shape!s:.40} in its base and {own} here"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
