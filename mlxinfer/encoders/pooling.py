"""From the hidden states of a batch to one vector a text; hidden states may come in chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.encoders.modules import DenseSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.encoders.modules import PoolMode, Step

SMALLEST_NORM = 1e-12
"""As in torch.nn.functional.normalize."""
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "Identity": lambda x: x,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "Sigmoid": mx.sigmoid,
}


class Pool:
    """Pools one batch in float32: `add` its hidden states from left to right, then take `result`."""

    def __init__(self, modes: Sequence[PoolMode], lengths: Sequence[int]) -> None:
        """Row b has lengths[b] tokens; what comes after them is padding."""
        self._modes = tuple(modes)
        self._lengths = mx.array(list(lengths))
        self._held: dict[PoolMode, mx.array] = {}

    def add(self, hidden: mx.array, start: int) -> None:
        """Hidden states [B, C, hidden] of the positions from `start` on."""
        positions = mx.arange(start, start + hidden.shape[1])
        hidden = hidden.astype(mx.float32)
        for mode in self._modes:
            before = self._held.get(mode)
            if (after := self._fold(mode, before, hidden, positions)) is not None:
                self._held[mode] = after

    def _fold(self, mode: PoolMode, before: mx.array | None, hidden: mx.array, positions: mx.array) -> mx.array | None:
        if mode == "cls":
            return hidden[:, 0] if before is None else before
        if mode == "max":
            real = (positions[None] < self._lengths[:, None])[..., None]
            part = mx.where(real, hidden, -math.inf).max(axis=1)
            return part if before is None else mx.maximum(before, part)
        part = (self._weights(mode, positions)[:, None] @ hidden)[:, 0]
        return part if before is None else before + part

    def _weights(self, mode: PoolMode, positions: mx.array) -> mx.array:
        """What each token counts [B, C]."""
        lengths = self._lengths[:, None]
        if mode == "lasttoken":
            return (positions[None] == lengths - 1).astype(mx.float32)
        real = (positions[None] < lengths).astype(mx.float32)
        return real * (positions[None] + 1) if mode == "weightedmean" else real

    def result(self) -> mx.array:
        """[B, hidden x modes]."""
        count = self._lengths[:, None].astype(mx.float32)
        divisors = {"mean": count, "mean_sqrt_len": mx.sqrt(count), "weightedmean": count * (count + 1) / 2}
        pooled = [self._held[m] / divisors[m] if m in divisors else self._held[m] for m in self._modes]
        return pooled[0] if len(pooled) == 1 else mx.concatenate(pooled, axis=-1)

    def held(self) -> list[mx.array]:
        """What is to be computed before the next chunk."""
        return list(self._held.values())


class Finish(nn.Module):
    """The parts of a model that follow its pooling: dense layers and normalisation, in float32."""

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.dense = [nn.Linear(s.in_features, s.out_features, bias=s.bias) for s in steps if isinstance(s, DenseSpec)]

    def __call__(self, x: mx.array) -> mx.array:
        """[B, pooled] → [B, dimensions]."""
        layers = iter(self.dense)
        for step in self.steps:
            x = normalized(x) if step == "normalize" else ACTIVATIONS[step.activation](next(layers)(x))
        return x


def normalized(x: mx.array) -> mx.array:
    """Each row divided by its length."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), SMALLEST_NORM)
