"""An update's gradients: summed over micro-batches and ranks, and whose fault it is where they are no numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.batches import Batches, Micro
    from mlxinfer.lora.interrupt import Interrupt
    from mlxinfer.lora.parallel import Ranks
    from mlxinfer.lora.types import Batch, Loss


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the summed loss, over all ranks; nothing is divided yet, so that no split of the rows matters."""

    gradients: dict[str, mx.array]
    """Float32."""
    loss: float
    count: float
    tokens: int
    interrupted: bool


class Gradients:
    """Takes them. Between two calls the model holds its weights and nothing of a graph."""

    def __init__(self, model: nn.Module, loss: Loss, batches: Batches, ranks: Ranks, interrupt: Interrupt) -> None:
        self._model, self._loss, self._batches, self._ranks = model, loss, batches, ranks
        self._interrupt = interrupt

    def sums(self, update: Sequence[Micro]) -> Sums:
        """Of this rank's part of an update, and with it of all."""
        weights: dict[str, Any] = dict(tree_flatten(self._model.trainable_parameters()))
        total = {name: mx.zeros(value.shape, mx.float32) for name, value in weights.items()}
        loss, count, tokens = mx.array(0.0), mx.array(0.0), 0
        for micro in update:
            if self._interrupt.asked and self._ranks.size == 1:
                break
            batch = self._batches.batch(micro)
            found, supervised, gradients = self._taken(batch)
            for name, value in gradients.items():
                total[name] = total[name] + value.astype(mx.float32)
            loss, count, tokens = loss + found, count + supervised, tokens + batch.num_tokens
            mx.eval(total, loss, count)
        total = self._ranks.sum(total)
        sums = self._ranks.sums(_number(loss), _number(count), tokens, float(self._interrupt.asked))
        mx.eval(total)
        return Sums(total, sums[0], sums[1], int(sums[2]), bool(sums[3]))

    def _taken(self, batch: Batch) -> tuple[mx.array, mx.array, dict[str, Any]]:
        weights = self._model.trainable_parameters()
        step = nn.value_and_grad(self._model, lambda held: self._loss(self._model, held))
        (found, supervised), gradients = step(batch)
        # The trace leaves its own arrays in the model, and with them its graph.
        self._model.update(weights)
        return found, supervised, dict(tree_flatten(gradients))

    def guilty(self, update: Sequence[Micro]) -> list[str]:
        """file:line of the rows whose own loss or gradient is no number; of all where none is by itself."""
        rows = [((unit,),) for micro in update for row in micro for unit in row]
        guilty = [row for row in rows if not self._is_finite(row)]
        return [where for row in guilty or rows for where in self._batches.where(row)]

    def _is_finite(self, micro: Micro) -> bool:
        found, _, gradients = self._taken(self._batches.batch(micro))
        fine = [mx.isfinite(found), *(mx.isfinite(value).all() for value in gradients.values())]
        return bool(mx.stack(fine).all().item())


def _number(value: mx.array) -> float:
    held: Any = value.item()
    return float(held)


def is_number(*values: float) -> bool:
    """Whether all are finite."""
    return all(math.isfinite(value) for value in values)
