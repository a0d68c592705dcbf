"""Put the extension's functions in the place of mlx's own, and take them out again.

Models look `mx.fast.rms_norm` and its kin up at each call, so the module's attribute is the place. The functions have
mlx's signatures and hand on to mlx what they don't support, other devices included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

REPLACED: dict[str, Any] = {
    "rms_norm": mx.fast,
    "rope": mx.fast,
    "scaled_dot_product_attention": mx.fast,
    "quantized_matmul": mx,
    "gather_qmm": mx,
    "logsumexp": mx,
}
"""Name of the kernel → where mlx has the function of that name."""

ORIGINAL: dict[str, Callable[..., Any]] = {name: getattr(place, name) for name, place in REPLACED.items()}
"""mlx's own functions, as they were when this module was imported."""


def install(extension: ModuleType, names: list[str]) -> None:
    """Make mlx's `names` those of the extension."""
    for name in names:
        setattr(REPLACED[name], name, getattr(extension, name))


def uninstall() -> None:
    """Make them mlx's own again."""
    for name, place in REPLACED.items():
        setattr(place, name, ORIGINAL[name])
