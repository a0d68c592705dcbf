"""Try each kernel against mlx's own operations on random input, half a second for all.

The tests hold the kernels to a float64 reference; this finds a compiler, a processor or an mlx for which one is wrong.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlxinfer.kernels.calls import OWN, REPLACED
from mlxinfer.kernels.cases import CASES, PLAIN

if TYPE_CHECKING:
    from types import ModuleType

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 6e-2}
"""Of the largest difference as a share of the largest value.

In half precision twice what mlx's own products and softmax are off, to which a kernel may hand a call on.
"""

FAULTS = (
    ArithmeticError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, subprocess.SubprocessError,
)  # fmt: skip
"""What a kernel, a compiler or a file may raise here. None of it reaches who wants to load a model."""


def names(extension: ModuleType) -> list[str]:
    """The kernels that an extension has, of those that are called."""
    return [name for name in (*REPLACED, *OWN) if hasattr(extension, name)]


def check(extension: ModuleType, name: str) -> str | None:
    """None when the kernel agrees with mlx's own; else how it doesn't."""
    for case in CASES[name]():
        try:
            got: Any = tree_flatten(getattr(extension, name)(*case.args, **case.kwargs))
            like: Any = tree_flatten(PLAIN[name](*case.args, **case.kwargs))
            wide: Any = tree_flatten(PLAIN[name](*_widened(case.args), **_widened(case.kwargs)))
            why = _difference(
                [case.part(a) for _, a in got], [case.part(a) for _, a in like], [case.part(a) for _, a in wide]
            )
        except FAULTS as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            return f"{case.label}: {why:.300}"
    return None


def _widened(tree: Any) -> Any:
    """Half-precision arrays in float32, in which mlx's own result has no error worth counting."""
    return tree_map(lambda a: a.astype(mx.float32) if isinstance(a, mx.array) and a.dtype in TOLERANCE else a, tree)


def _difference(got: list[mx.array], like: list[mx.array], wide: list[mx.array]) -> str | None:
    """`like` has the wanted shapes and dtypes and is never computed, `wide` the values."""
    if len(got) != len(like):
        return f"{len(got)} results, mlx gives {len(like)}"
    for ours, shape, values in zip(got, like, wide, strict=True):
        if (ours.shape, ours.dtype) != (shape.shape, shape.dtype):
            return f"gives {ours.dtype} {ours.shape}, mlx {shape.dtype} {shape.shape}"
        apart = mx.max(mx.abs(ours.astype(mx.float32) - values))
        share = (apart / mx.maximum(mx.max(mx.abs(values)), 1e-30)).item()
        assert isinstance(share, float)
        # The other way round NaN would pass.
        if not share <= TOLERANCE[ours.dtype]:
            return f"differs by {share:.2g} of the largest value"
    return None
