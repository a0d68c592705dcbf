"""CPU kernels behind mlx's calls, for Linux machines and Macs without Metal. Never required.

`build` makes the extension out of `cpp/`, `calls` puts its functions in the place of mlx's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_functions: dict[str, Callable[..., Any]] = {}


def find(name: str) -> Callable[..., Any] | None:
    """The kernel of that name, where it is in use."""
    return _functions.get(name)
