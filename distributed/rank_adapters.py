"""Adapters on one rank: over layers that mlx has shared out, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import upstream
from mlxinfer.engine.adapters import Adapters, Place
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.engine.adapter_files import AdapterFiles


class RankAdapters(Adapters):
    """Of the part that a rank holds; whether they go with the whole model was checked where the scheduler is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._elsewhere: set[str] = set()

    def add(self, files: AdapterFiles) -> None:
        """Register a part; it is read when a step first needs it."""
        self._files[files.name] = files

    def add_elsewhere(self, name: str) -> None:
        """Register an adapter of which this rank's layers have nothing."""
        self._elsewhere.add(name)

    def use(self, name: str) -> None:
        super().use("" if name in self._elsewhere else name)

    def _checked(self, files: AdapterFiles, tensors: Mapping[str, Any]) -> dict[str, Place]:
        paths = {name.rpartition(".")[0] for name in tensors}
        places: dict[str, Place] = {}
        for path, container, key, own in upstream.child_slots(self._model):
            if path in paths:
                layer = upstream.lora_layer(own, rank=files.rank, scale=files.scale, dora=files.dora)
                places[path] = Place(container, key, own, _Summed(layer) if _sums(own) else layer)
        if missing := paths - places.keys():
            raise ModelFileError(f"{files.weights} has layers that this rank doesn't hold, as {min(missing)}")
        return places


def _sums(module: nn.Module) -> bool:
    """Whether the ranks' parts of its output are added up inside of it."""
    return isinstance(module, nn.ShardedToAllLinear | nn.QuantizedShardedToAllLinear)


class _Summed(nn.Module):
    """A layer of which each rank has some columns, with an adapter of which each has some rows of `lora_a`.

    Only r numbers a token go between the ranks for it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        made: Any = layer
        self.linear, self.scale = made.linear, made.scale
        self.lora_a, self.lora_b = made.lora_a, made.lora_b

    def __call__(self, x: mx.array) -> mx.array:
        inner = mx.distributed.all_sum(x @ self.lora_a, group=self.linear.group)
        return self.linear(x) + (self.scale * (inner @ self.lora_b)).astype(x.dtype)
