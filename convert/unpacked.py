"""Training packed layers on a CPU, where mlx multiplies by packed weights code by code, ten times slower than BLAS."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import runtime

if TYPE_CHECKING:
    from collections.abc import Iterator


class UnpackedLinear(nn.QuantizedLinear):
    """Writes its weight out at each call; gradients reach scales and biases."""

    def __call__(self, x: mx.array) -> mx.array:
        product = x @ _written_out(self).T
        return product + self["bias"] if "bias" in self else product


class UnpackedEmbedding(nn.QuantizedEmbedding):
    """The same for embeddings that are the head as well."""

    def as_linear(self, x: mx.array) -> mx.array:
        return x @ _written_out(self).T


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: UnpackedLinear,
    nn.QuantizedEmbedding: UnpackedEmbedding,
}


@contextlib.contextmanager
def unpacked_on_cpu(model: nn.Module) -> Iterator[None]:
    """Within, packed layers of `model` compute on weights that are written out, where mlx computes on a CPU."""
    changed = [m for _, m in model.named_modules() if type(m) in CLASSES] if runtime.on_cpu() else []
    for module in changed:
        module.__class__ = CLASSES[type(module)]
    try:
        yield
    finally:
        originals = {ours: theirs for theirs, ours in CLASSES.items()}
        for module in changed:
            module.__class__ = originals[type(module)]


def _written_out(module: Any) -> mx.array:
    scales, biases = module["scales"], module.get("biases")
    return mx.dequantize(module["weight"], scales, biases, module.group_size, module.bits, module.mode)
