"""Gradient checkpointing of the layers of one model, undone afterwards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.head import layers_of
from mlxinfer.lora.attention import in_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.nn as nn


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Inside, each layer keeps its inputs only and is computed again on the way back.

    By instance: classes stay as they are, and layers are what they were when the context ends. The gradient must be
    taken inside it. Nested contexts recompute once.
    """
    swapped: list[tuple[Any, type]] = []
    try:
        for layer in layers_of(model):
            own = type(layer)
            if not hasattr(own, "recomputes"):
                layer.__class__ = type(own.__name__, (own,), {"__call__": _call_of(own), "recomputes": True})
                swapped.append((layer, own))
        with in_blocks(recompute=True):
            yield
    finally:
        for layer, own in swapped:
            layer.__class__ = own


def _call_of(own: Any) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        def inner(parameters: Any, *inputs: Any, **more: Any) -> Any:
            before = self.trainable_parameters()
            self.update(parameters)
            try:
                return own.__call__(self, *inputs, **more)
            finally:
                # Or the layer would be left with arrays that hang on the graph of the way back.
                self.update(before)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args, **options)

    return call
