"""Rows made by hand, and a tiny model to train on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxinfer.lora.types import Example
from tests import tiny


@dataclass(frozen=True)
class Rows:
    """A data set of examples."""

    items: tuple[Example, ...]


def rows(count: int, seed: int = 0, longest: int = 24) -> Rows:
    """`count` random rows; the first third of each isn't supervised, so that counts of targets differ."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        length = int(rng.integers(4, longest))
        ids = tuple(int(i) for i in rng.integers(3, 320, length))
        learnt = tuple(place > length // 3 for place in range(length))
        made.append(Example(ids, learnt, f"rows.jsonl:{number + 1}"))
    return Rows(tuple(made))


def model(**changes: object) -> Any:
    """A Llama of two layers, the same each time."""
    return tiny.build_model(tiny.config(num_hidden_layers=2, **changes), scale=1.0)


def cross_entropy(net: Any, batch: Any) -> Any:
    """(sum, count) over the whole logits at once, for rows of one segment: the plain form of the supervised loss."""
    losses = nn.losses.cross_entropy(net(batch.inputs).astype(mx.float32), batch.targets)
    return (losses * batch.weights).sum(), batch.weights.sum()
