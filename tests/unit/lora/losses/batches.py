"""Batches of made-up tokens, and the plain form of the supervised loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxinfer.lora.types import Batch, Example

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def example(rng: np.random.Generator, length: int, vocab: int = 100, prompt: int = 3) -> Example:
    ids = rng.integers(1, vocab, length)
    return Example(tuple(int(i) for i in ids), (False,) * prompt + (True,) * (length - prompt), "made up:1")


def collate(rows: Sequence[Sequence[Example]], width: int, **more: Any) -> Batch:
    inputs, targets, segments = (np.zeros((len(rows), width), np.int32) for _ in range(3))
    weights = np.zeros((len(rows), width), np.float32)
    for r, row in enumerate(rows):
        at = 0
        for number, one in enumerate(row, 1):
            end = at + len(one.token_ids)
            inputs[r, at:end] = one.token_ids
            targets[r, at : end - 1] = one.token_ids[1:]
            weights[r, at : end - 1] = one.supervised[1:]
            segments[r, at:end] = number
            at = end
    return Batch(
        *(mx.array(a) for a in (inputs, targets, weights, segments)),
        num_examples=sum(map(len, rows)),
        num_tokens=int((segments > 0).sum()),
        num_targets=int(weights.sum()),
        **more,
    )


def plain(model: Any, batch: Batch) -> tuple[mx.array, mx.array]:
    """Cross entropy over the whole logits."""
    losses = nn.losses.cross_entropy(model(batch.inputs).astype(mx.float32), batch.targets)
    return (losses * batch.weights).sum(), batch.weights.sum()


def gradient(
    model: nn.Module, loss: Callable[[nn.Module, Batch], tuple[mx.array, mx.array]], batch: Batch
) -> tuple[float, dict[str, mx.array]]:
    (value, _), slopes = nn.value_and_grad(model, lambda b: loss(model, b))(batch)
    flat: Any = dict(tree_flatten(slopes))
    mx.eval(value, flat)
    return float(value.item()), flat


def off_by(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> float:
    """max |a - b| over all parameters, of the largest |b|."""
    assert ours.keys() == theirs.keys()
    largest = max(float(mx.abs(array).max().item()) for array in theirs.values())
    assert largest > 0
    return max(float(mx.abs(ours[name] - theirs[name]).max().item()) for name in theirs) / largest
