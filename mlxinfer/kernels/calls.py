"""Put the extension's functions in the place of mlx's own, and take them out again.

Models look `mx.fast.rms_norm` and its kin up at each call, so the module's attribute is the place. The functions have
mlx's signatures and hand on to mlx what they don't support, other devices included. Those that mlx has no function
for are had by `kernel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

REPLACED: dict[str, Any] = {
    "rms_norm": mx.fast,
    "rope": mx.fast,
    "scaled_dot_product_attention": mx.fast,
    "quantized_matmul": mx,
    "gather_qmm": mx,
    "logsumexp": mx,
    "softmax": mx,
}
"""Name of the kernel → where mlx has the function of that name."""

OWN = ("silu_mul", "gelu_mul", "ragged_attention", "half_matmul")
"""Kernels that mlx has no function for."""

ORIGINAL: dict[str, Callable[..., Any]] = {name: getattr(place, name) for name, place in REPLACED.items()}
"""mlx's own functions, as they were when this module was imported."""

_in_use: dict[str, Callable[..., Any]] = {}


def install(extension: ModuleType, names: Iterable[str]) -> None:
    """Make mlx's functions of these `names` those of the extension, and the others what `kernel` gives."""
    put({name: getattr(extension, name) for name in names})


def put(functions: Mapping[str, Callable[..., Any]]) -> None:
    """As `install`, with any functions."""
    for name, function in functions.items():
        _in_use[name] = function
        if name in REPLACED:
            setattr(REPLACED[name], name, function)


def uninstall() -> None:
    """Make them mlx's own again."""
    _in_use.clear()
    for name, place in REPLACED.items():
        setattr(place, name, ORIGINAL[name])


def in_use() -> dict[str, Callable[..., Any]]:
    """The kernels that are in their places, by name."""
    return dict(_in_use)


def kernel(name: str) -> Callable[..., Any] | None:
    """The kernel of that name; None where it is not in use."""
    return _in_use.get(name)
