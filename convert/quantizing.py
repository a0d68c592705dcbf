"""Which matrices are packed and how: the forms mlx has, what a recipe asks for and what a matrix allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import mlx.core as mx

from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MODES = {
    "affine": Packing(4, 64),
    "mxfp4": Packing(4, 32, "mxfp4"),
    "mxfp8": Packing(8, 32, "mxfp8"),
    "nvfp4": Packing(4, 16, "nvfp4"),
}
"""Each mode of mlx with its default; all but affine have this form only."""
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (128, 64, 32)

Misfit = Literal["smaller", "floats", "refuse"]
"""For a matrix whose columns are no multiple of the group size: a smaller group if one fits, floats, or an error."""

Quantizer = Callable[[mx.array, Packing], tuple[mx.array, mx.array, mx.array | None]]
"""Weight [..., rows, columns] → words, scales, biases as `mx.quantize` gives them. Rows do not depend on each other."""


class Recipe(Protocol):
    """What each matrix is to be packed as."""

    @property
    def name(self) -> str: ...

    def decide(self, path: str, shape: tuple[int, ...]) -> Packing | None:
        """The form for the module at `path`, whose weight has `shape`; None for floats."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """The same form for every matrix."""

    packing: Packing

    @property
    def name(self) -> str:
        return describe(self.packing)

    def decide(self, path: str, shape: tuple[int, ...]) -> Packing | None:
        return self.packing


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of one matrix."""

    packing: Packing | None
    note: str = ""


def min_max(weight: mx.array, packing: Packing) -> tuple[mx.array, mx.array, mx.array | None]:
    """Scales from the smallest and largest value of each group, as mlx-lm's convert."""
    words, scales, *biases = mx.quantize(weight, packing.group_size, packing.bits, packing.mode)
    return words, scales, biases[0] if biases else None


def packing_of(bits: int | None, group_size: int | None, mode: str | None) -> Packing:
    """A form of mlx from the values a user gave; what is left open is the mode's default.

    Raises InvalidRequestError for a combination that mlx doesn't have.
    """
    mode = mode or "affine"
    if mode not in MODES:
        raise InvalidRequestError(f"mode is {mode!r:.40}; it must be one of {', '.join(MODES)}", param="mode")
    default = MODES[mode]
    bits = default.bits if bits is None else bits
    packing = Packing(bits, default.group_size if group_size is None else group_size, default.mode)
    check_packing(packing)
    return packing


def check_packing(packing: Packing) -> None:
    """Raises InvalidRequestError for a form that mlx doesn't have."""
    if packing.mode != "affine":
        if packing != MODES.get(packing.mode):
            only = MODES[packing.mode]
            raise InvalidRequestError(
                f"{packing.mode} has {only.bits} bits and groups of {only.group_size} only, "
                f"not {packing.bits} bits and groups of {packing.group_size}",
                param="bits" if packing.bits != only.bits else "group_size",
            )
        return
    if packing.bits not in AFFINE_BITS:
        known = ", ".join(map(str, AFFINE_BITS))
        raise InvalidRequestError(f"bits is {packing.bits}; affine quantization has {known}", param="bits")
    if packing.group_size not in AFFINE_GROUPS:
        known = ", ".join(map(str, reversed(AFFINE_GROUPS)))
        raise InvalidRequestError(f"the group size is {packing.group_size}; it must be {known}", param="group_size")


def describe(packing: Packing | None) -> str:
    """For example "4-bit affine, groups of 64", "mxfp4" or "floats"."""
    if packing is None:
        return "floats"
    if packing.mode != "affine":
        return packing.mode
    return f"{packing.bits}-bit affine, groups of {packing.group_size}"


def choose(path: str, shape: tuple[int, ...], recipe: Recipe, said: bool | Mapping[str, Any], misfit: Misfit) -> Choice:
    """The form for a matrix: what the recipe asks for, unless the model's code or the matrix stands against it.

    `said` is the model's `quant_predicate`: False keeps floats; arguments of its own hold where they are of more bits
    than the recipe's, as for the routers of experts. Raises InvalidRequestError where misfit is "refuse".
    """
    wanted = recipe.decide(path, shape)
    if wanted is None:
        return Choice(None, "the recipe keeps it in floats")
    check_packing(wanted)
    if said is False:
        return Choice(None, "the model's code keeps it in floats")
    note = ""
    if isinstance(said, dict):
        own = packing_of(said.get("bits"), said.get("group_size"), said.get("mode"))
        if own.bits > wanted.bits:
            wanted, note = own, f"the model's code asks for {describe(own)}"
    return _fitted(path, shape, Choice(wanted, note), misfit)


def _fitted(path: str, shape: tuple[int, ...], choice: Choice, misfit: Misfit) -> Choice:
    wanted, columns = choice.packing, shape[-1]
    assert wanted is not None
    if columns % wanted.group_size == 0:
        return choice
    problem = f"{columns} columns are no multiple of the group size {wanted.group_size}"
    if misfit == "refuse":
        raise InvalidRequestError(f"{path}: {problem}; choose another group size", param="group_size")
    if misfit == "smaller" and wanted.mode == "affine":
        for group in AFFINE_GROUPS:
            if group < wanted.group_size and columns % group == 0:
                return Choice(Packing(wanted.bits, group), f"groups of {group}: {problem}")
    return Choice(None, f"kept in floats: {problem}")


def packed_parts(shape: tuple[int, ...], packing: Packing, dtype: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """(suffix, dtype, shape) of what mlx holds a matrix as; `dtype` is that of affine scales."""
    *lead, columns = shape
    groups = (*lead, columns // packing.group_size)
    parts = [("weight", "uint32", (*lead, columns * packing.bits // 32))]
    if packing.mode == "affine":
        return [*parts, ("scales", dtype, groups), ("biases", dtype, groups)]
    return [*parts, ("scales", "uint8", groups)]


def config_entry(packings: Mapping[str, tuple[Packing, int]]) -> dict[str, Any]:
    """config.json's "quantization" for packed modules, by path, with their sizes; empty when there are none.

    The form that holds most weights is the default, the others are listed by path.
    """
    if not packings:
        return {}
    weights: dict[Packing, int] = {}
    for packing, size in packings.values():
        weights[packing] = weights.get(packing, 0) + size
    default = max(weights, key=lambda p: (weights[p], p.bits, p.group_size, p.mode))
    return _as_dict(default) | {path: _as_dict(p) for path, (p, _) in packings.items() if p != default}


def widest(packings: Iterable[Packing]) -> Packing:
    """The one of most bits, then of the smallest group."""
    return max(packings, key=lambda p: (p.bits, -p.group_size, p.mode))


def _as_dict(packing: Packing) -> dict[str, Any]:
    return {"group_size": packing.group_size, "bits": packing.bits, "mode": packing.mode}
