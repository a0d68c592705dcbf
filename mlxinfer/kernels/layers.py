"""Layers that hold their weights as stored, in half precision or packed, and compute in float32.

A loaded model's plain layers are made these by a change of class: weights, names and whatever else hangs on a layer
stay, and `isinstance` still finds an nn.Linear.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import kernels


class Linear(nn.Linear):
    """nn.Linear on float32 activations."""

    def __call__(self, x: mx.array) -> mx.array:
        """[…, input_dims] → […, output_dims]."""
        out = product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


class Embedding(nn.Embedding):
    """nn.Embedding that gives float32."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x).astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        return product(x, self["weight"])


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding that gives float32, whatever its scales are."""

    def __call__(self, x: mx.array) -> mx.array:
        scales = self["scales"][x]
        if not mx.issubdtype(scales.dtype, mx.floating):
            return super().__call__(x).astype(mx.float32)
        # Unpacked in the dtype of its scales, every number would be rounded to that.
        return mx.dequantize(
            self["weight"][x],
            scales.astype(mx.float32),
            self["biases"][x].astype(mx.float32),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., K] times the transpose of weight [N, K]."""
    kernel = kernels.kernel("half_matmul")
    if kernel is None or x.dtype != mx.float32:
        return x @ weight.T
    return kernel(x, weight)


CLASSES: dict[type, type[Any]] = {
    nn.Linear: Linear, nn.Embedding: Embedding, nn.QuantizedEmbedding: QuantizedEmbedding,
}  # fmt: skip


def adopt(model: nn.Module) -> set[str]:
    """Make a model's plain layers those of this file; returns the paths of the weights that may stay as stored.

    Subclasses of other people's are left alone: nobody knows what they do with their weights.
    """
    kept: set[str] = set()
    for path, module in model.named_modules():
        own = CLASSES.get(type(module))
        if own is not None:
            module.__class__ = own
        if type(module) in CLASSES.values() and not isinstance(module, nn.QuantizedEmbedding):
            kept.add(f"{path}.weight")
        elif isinstance(module, QuantizedEmbedding | nn.QuantizedLinear):
            kept |= {f"{path}.scales", f"{path}.biases"}
    return kept
