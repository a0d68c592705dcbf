"""What an adapter makes of each matrix of its base, some rows at a time, and how much of that a stored form keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer.convert.export.folder import narrowed, slices, widened
from mlxinfer.convert.export.packed import floats_of
from mlxinfer.convert.quantizing import min_max
from mlxinfer.lora import bases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.convert.export.folder import MLXFolder, Parameter
    from mlxinfer.convert.sources.base import Packing
    from mlxinfer.lora.adapter import Adapter

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
MIN_KEPT = 0.9
"""Of an adapter's change in every layer; less is refused unless forced."""


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one parameter."""

    kind: str
    """"Linear", "SwitchLinear", "Embedding", or "full"."""
    arrays: Mapping[str, mx.array]
    """float32: lora_a, lora_b and, of DoRA, m; of "full" the new values, "weight"."""
    scale: float = 1.0

    def rows(self, base: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of the new matrix, float32, where those of the base are `base` (rows, columns)."""
        if self.kind == "full":
            return np.array(self.arrays["weight"].reshape(-1, base.shape[-1])[start:stop])
        weight = mx.array(base) + self.scale * self._product(start, stop)
        if "m" in self.arrays:
            weight = (self.arrays["m"][start:stop] / mx.linalg.norm(weight, axis=1))[:, None] * weight
        return np.array(weight)

    def _product(self, start: int, stop: int) -> mx.array:
        a, b = self.arrays["lora_a"], self.arrays["lora_b"]
        if self.kind == "Embedding":
            return a[start:stop] @ b
        if self.kind == "Linear":
            return b.T[start:stop] @ a.T
        height = b.shape[1]
        parts: list[mx.array] = []
        for expert in range(start // height, -(-stop // height)):
            first = expert * height
            parts.append(b[expert, max(start - first, 0) : min(stop - first, height)] @ a[expert])
        return mx.concatenate(parts)


def changes_of(adapter: Adapter, model: nn.Module) -> dict[str, Change]:
    """By the names of the base's parameters. `model` is the base, with or without weights."""
    if adapter.options.method == "full":
        return {name: Change("full", {"weight": w.astype(mx.float32)}) for name, w in adapter.weights.items()}
    layers = bases.layers_of(model)
    found: dict[str, Change] = {}
    for path in adapter.options.targets:
        leaves = [leaf for leaf in ("lora_a", "lora_b", "m") if f"{path}.{leaf}" in adapter.weights]
        arrays = {leaf: adapter.weights[f"{path}.{leaf}"].astype(mx.float32) for leaf in leaves}
        found[f"{path}.weight"] = Change(bases.kind_of(layers[path]), arrays, adapter.options.scale)
    return found


@dataclass(frozen=True, slots=True)
class Form:
    """How a parameter is stored."""

    packing: Packing | None
    dtype: str
    """Of the floats, or of affine scales: F32, F16 or BF16."""

    def parts(self, values: np.ndarray, name: str) -> list[np.ndarray]:
        """float32 rows as they are stored: themselves narrowed, or words, scales and, in affine mode, biases."""
        if self.packing is None:
            return [narrowed(values, self.dtype, name)]
        parts = [
            part for part in min_max(mx.array(values).astype(DTYPES[self.dtype]), self.packing) if part is not None
        ]
        return [np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part) for part in parts]

    def floats(self, parts: list[np.ndarray]) -> np.ndarray:
        """What is computed with them, float32."""
        if self.packing is None:
            return widened(parts[0])
        affine = self.packing.mode == "affine"
        return floats_of(parts[0], [widened(part) if affine else part for part in parts[1:]], self.packing)


@dataclass(frozen=True, slots=True)
class Kept:
    """How much of an adapter's change a stored matrix has."""

    name: str
    form: Form
    size: float
    """Norm of the adapter's change relative to that of the base's weights."""
    cosine: float
    """Between the change that is stored and the adapter's."""
    norm: float
    """Of the stored change relative to the adapter's."""

    @property
    def share(self) -> float:
        """1 for all of it. Less where the change shrank, points elsewhere, or drowns in rounding."""
        return self.cosine * min(self.norm, 1.0)


@dataclass(frozen=True, slots=True)
class Fused:
    """What was written, or, of a dry run, would be."""

    path: Path
    layers: tuple[Kept, ...]
    nbytes: int

    @property
    def lost(self) -> list[Kept]:
        """Layers that keep less than MIN_KEPT, the worst first."""
        # Not "below": a share that is no number is lost too.
        return sorted((kept for kept in self.layers if not kept.share >= MIN_KEPT), key=lambda kept: kept.share)


def measure(model: MLXFolder, parameter: Parameter, change: Change, form: Form) -> Kept:
    """Compare the stored form with the adapter's change. Memory: some rows."""
    wanted = stored = both = base = 0.0
    for start, stop, old, new in changed_rows(model, parameter, change):
        delta = (new - old).astype(np.float64)
        kept = form.floats(form.parts(new, parameter.name)).astype(np.float64) - old
        wanted += float((delta * delta).sum())
        stored += float((kept * kept).sum())
        both += float((delta * kept).sum())
        base += float((old.astype(np.float64) ** 2).sum())
        del start, stop
    size = math.sqrt(wanted / base) if base else math.inf
    if wanted == 0:
        return Kept(parameter.name, form, 0.0, 1.0, 1.0)
    cosine = both / math.sqrt(wanted * stored) if stored else 0.0
    return Kept(parameter.name, form, size, cosine, math.sqrt(stored / wanted))


def changed_rows(
    model: MLXFolder, parameter: Parameter, change: Change
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(start, stop, the base's rows, the new ones), float32, in order."""
    for start, stop in slices(parameter.rows, parameter.columns):
        old = model.float_rows(parameter, start, stop)
        yield start, stop, old, change.rows(old, start, stop)
