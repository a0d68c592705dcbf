"""Which layers of a model are trained: names or globs, and how many blocks from the end."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.nn as nn


def block_prefixes(model: nn.Module) -> list[str]:
    """The paths of the transformer blocks, in order."""
    held: Any = model
    blocks = {id(block): number for number, block in enumerate(held.layers)}
    found = [(blocks[id(module)], path) for path, module in model.named_modules() if id(module) in blocks]
    return [path for _, path in sorted(found)]


def matches(path: str, pattern: str) -> bool:
    """A pattern is a whole path, the last parts of one ("q_proj", "self_attn.q_proj"), or a glob over either."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def select(model: nn.Module, candidates: Sequence[str], patterns: Sequence[str], num_layers: int | None) -> list[str]:
    """The candidates that match, those outside the last `num_layers` blocks left out.

    Without patterns: everything inside the blocks; what is outside them only by name.
    Raises InvalidRequestError for a pattern that matches nothing, and for more layers than there are.
    """
    blocks = block_prefixes(model)
    if num_layers is not None and not 1 <= num_layers <= len(blocks):
        raise InvalidRequestError(f"num_layers is {num_layers}; the model has {len(blocks)}", param="num_layers")
    kept = blocks if num_layers is None else blocks[-num_layers:]

    def block_of(path: str) -> str | None:
        return next((block for block in blocks if path.startswith(f"{block}.")), None)

    inside = [path for path in candidates if block_of(path) in kept]
    if not patterns:
        return inside
    reachable = set(inside) | {path for path in candidates if block_of(path) is None}
    chosen: set[str] = set()
    for pattern in patterns:
        found = {path for path in reachable if matches(path, pattern)}
        if not found:
            names = ", ".join(sorted({path.rsplit(".", 1)[-1] for path in reachable}))
            raise InvalidRequestError(f"targets: {pattern!r:.160} matches no layer; there are {names}", param="targets")
        chosen |= found
    return [path for path in candidates if path in chosen]
