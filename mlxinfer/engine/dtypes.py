"""The dtypes of a model's weights in memory, and what they take there.

On a GPU one dtype for all floating-point weights. A CPU computes in float32: with the kernels the large matrices stay
as they are stored, half precision or packed; without them they are made float32 when the model loads, packed ones
where memory allows, since mlx's own products are many times slower on anything else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlxinfer import kernels, runtime, upstream
from mlxinfer.engine.governor import governor
from mlxinfer.kernels import layers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.formats.safetensors import TensorInfo

DEQUANTIZE_SHARE = 0.5
"""Without the kernels a quantized model is dequantized at load when the result takes at most this share of memory."""
PRODUCTS = ("quantized_matmul", "half_matmul")
"""The kernels that compute on weights as stored."""


def as_stored() -> bool:
    """Whether weights stay in memory as they are stored and are computed with in float32."""
    return runtime.on_cpu() and all(kernels.kernel(name) is not None for name in PRODUCTS)


def apply_dtype_policy(model: nn.Module, setting: str) -> str:
    """Cast the floating-point weights to one dtype: a stray float32 norm would promote everything. Its name.

    Weights that mlx-lm's model keeps out of casts (`cast_predicate`: router biases, decay rates) stay as they are.
    """
    counts: dict[mx.Dtype, int] = {}
    for weight in parameters(model):
        if mx.issubdtype(weight.dtype, mx.floating):
            counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.size
    own = max(counts, key=lambda d: counts[d], default=mx.float32)
    target = runtime.compute_dtype(setting, own)
    may_cast: Any = getattr(model, "cast_predicate", lambda _path: True)
    stored = layers.adopt(model) if target == mx.float32 and as_stored() else set()

    def cast(path: str, weight: mx.array) -> mx.array:
        kept = path in stored or (target != mx.float32 and not may_cast(path))
        return weight if kept or not mx.issubdtype(weight.dtype, mx.floating) else weight.astype(target)

    if any(d != target for d in counts):
        model.update(tree_map_with_path(cast, model.parameters()))
    if runtime.on_cpu() and not stored and is_quantized(model):
        plain = upstream.num_parameters(model) * target.size
        if plain <= governor().whole * DEQUANTIZE_SHARE - governor().held_bytes():
            upstream.dequantize(model)
    return str(target).removeprefix("mlx.core.")


def bytes_in_memory(tensors: Mapping[str, TensorInfo], setting: str) -> int:
    """What the weights will take: floats in the compute dtype or as stored, packed ones as stored."""
    size = runtime.compute_dtype(setting, mx.bfloat16).size
    half = 2 if as_stored() else size
    sizes = {"F64": size, "F32": size, "F16": min(half, size), "BF16": min(half, size)}
    return sum(math.prod(t.shape) * sizes[t.dtype] if t.dtype in sizes else t.nbytes for t in tensors.values())


def is_quantized(model: nn.Module) -> bool:
    """Whether any layer's weights are packed."""
    return any(isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding) for m in model.modules())


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(w.nbytes for w in parameters(model))


def parameters(model: nn.Module) -> list[mx.array]:
    """Every weight of a model."""
    flat: Any = tree_flatten(model.parameters())
    return [weight for _, weight in flat]
