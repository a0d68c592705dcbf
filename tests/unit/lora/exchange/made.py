"""Adapters of random numbers on tiny models, in memory and on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.lora import MethodOptions, apply, save_adapter

if TYPE_CHECKING:
    from pathlib import Path

IDS = mx.array([[3, 4, 5, 6, 7, 9, 11, 13]])


def adapt(net: Any, options: MethodOptions, *, seed: int = 3, size: float = 0.1) -> Any:
    """Put adapters on `net` that do something."""
    mx.random.seed(seed)
    apply(net, options)
    found: Any = tree_flatten(net.trainable_parameters())
    net.load_weights([(name, value + size * mx.random.normal(value.shape)) for name, value in found], strict=False)
    net.eval()
    return net


def write(folder: Path, net: Any, options: MethodOptions, **how: Any) -> Any:
    """Adapt `net`, save its adapter as `folder`, and return it."""
    adapt(net, options, **how)
    save_adapter(folder, net, options, {})
    return net
