"""How much each matrix suffers from fewer bits, and the bits for each that lose least at a given size.

The loss is the KL divergence of the quantized model's next-token distribution from the float model's. To second order
it is a half of d' F d, where d is the change of the weights and F the Fisher information: the covariance of the
gradient of log p(y | x) with y drawn from the model itself. F is never formed. Rounding errors of different weights are
nearly independent, so d' F d is close to the sum over weights of (gradient · d)²: the mean square of the gradient over
rows of text prices every width of every matrix.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.convert.quantizing import AFFINE_GROUPS, check_packing, min_max
from mlxinfer.convert.recipes import Plan
from mlxinfer.convert.sources.base import Packing
from mlxinfer.errors import InvalidRequestError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Quantizer = Callable[[mx.array, Packing], tuple[mx.array, mx.array, mx.array | None]]

DEFAULT_WIDTHS = tuple(Packing(bits, 64) for bits in (2, 3, 4, 5, 6, 8))


@dataclass(frozen=True, slots=True)
class Offer:
    """One form of one matrix."""

    packing: Packing
    bits: int
    """Of the whole matrix with its scales and biases."""
    loss: float
    """Expected KL divergence in nats per token, when this matrix alone has that form."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What each form of each matrix costs."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, by module path."""
    offers: Mapping[str, Sequence[Offer]]
    """Ascending by size."""
    other_bits: int
    """Of what isn't packed: norms, biases, matrices that no group size fits."""
    other_weights: int


def packable(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that mlx can pack, by path, in the model's order. A module that is used twice is there once."""
    leaves: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return {path: module for path, module in leaves if hasattr(module, "to_quantized") and "weight" in module}


def measure_sensitivity(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    *,
    quantizer: Quantizer = min_max,
    widths: Sequence[Packing] = DEFAULT_WIDTHS,
    scale_bits: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Price every form in `widths` of every matrix of `model`, a float model, over `rows` of token ids.

    Takes the memory of the model, twice that of its gradient, and of one matrix. Works on the calling thread; the model
    is left as it was. `quantizer` runs once for each form of each matrix. `scale_bits`: of an
    affine scale as stored. Raises UnsupportedModelError for a model without gradients or with nothing to pack.
    """
    for packing in widths:
        check_packing(packing)
    modules = packable(model)
    shapes = {path: tuple(module["weight"].shape) for path, module in modules.items()}
    forms = {path: [p for packing in widths if (p := fitting(packing, shape))] for path, shape in shapes.items()}
    forms = {path: found for path, found in forms.items() if found}
    if not forms or not rows:
        raise UnsupportedModelError("there is nothing to measure: no matrix that mlx can pack, or no text")
    squares: dict[str, mx.array] = {}
    key = mx.random.key(seed)
    for done, row in enumerate(rows):
        key, own = mx.random.split(key)
        gradients = _gradients(model, list(forms), row, own)
        for path in forms:
            gradient = gradients.pop(path).astype(mx.float32)
            # Per token of the row: likelihoods of tokens add up, and so do their variances.
            square = gradient * gradient / len(row)
            squares[path] = squares[path] + square if path in squares else square
            mx.eval(squares[path])
        if progress is not None:
            progress(done + 1, len(rows))
    losses = {
        path: [_loss(modules[path]["weight"], squares[path], p, quantizer) / (2 * len(rows)) for p in found]
        for path, found in forms.items()
    }
    parameters: Any = tree_flatten(model.parameters())
    others = [value for name, value in parameters if name.removesuffix(".weight") not in forms]
    return Sensitivity(
        shapes={path: shapes[path] for path in forms},
        offers={path: _offers(shapes[path], found, losses[path], scale_bits) for path, found in forms.items()},
        other_bits=sum(value.size for value in others) * scale_bits,
        other_weights=sum(value.size for value in others),
    )


def fitting(packing: Packing, shape: tuple[int, ...]) -> Packing | None:
    """`packing`, with a smaller group where the columns ask for it."""
    if shape[-1] % packing.group_size == 0:
        return packing
    groups = [g for g in AFFINE_GROUPS if g < packing.group_size and shape[-1] % g == 0]
    return Packing(packing.bits, groups[0]) if groups and packing.mode == "affine" else None


def _gradients(model: nn.Module, paths: Sequence[str], row: Sequence[int], key: mx.array) -> dict[str, mx.array]:
    """Gradients of log p(y | row) with respect to the matrices, y drawn from the model at every position."""
    forward: Any = model
    tokens = mx.array([row])
    drawn = mx.random.categorical(forward(tokens).astype(mx.float32), key=key)
    mx.eval(drawn)

    def likelihood(weights: list[mx.array]) -> mx.array:
        replace(weights)
        logits = forward(tokens).astype(mx.float32)
        return -nn.losses.cross_entropy(logits, drawn, reduction="sum")

    def replace(weights: list[mx.array]) -> None:
        tree: Any = tree_unflatten([(f"{path}.weight", w) for path, w in zip(paths, weights, strict=True)])
        model.update(tree)

    modules = packable(model)
    weights = [modules[path]["weight"] for path in paths]
    try:
        gradients = mx.grad(likelihood)(weights)
        mx.eval(gradients)
    except ValueError as error:
        raise UnsupportedModelError(f"the model has no gradients, so its layers can't be compared: {error}") from error
    finally:
        replace(weights)
    return dict(zip(paths, gradients, strict=True))


def _loss(weight: mx.array, squares: mx.array, packing: Packing, quantizer: Quantizer) -> float:
    words, scales, biases = quantizer(weight, packing)
    restored = mx.dequantize(words, scales, biases, packing.group_size, packing.bits, packing.mode)
    change = restored.astype(mx.float32) - weight.astype(mx.float32)
    # Matrix by row: one sum over millions of float32 would lose what small rows add.
    return float(_total((squares * (change * change)).sum(axis=-1)))


def _total(values: mx.array) -> float:
    """The sum as a Python float."""
    total: Any = values.sum().item()
    return total


def bits_of(shape: tuple[int, ...], packing: Packing, scale_bits: int = 16) -> int:
    """Bits of a packed matrix with its scales and biases."""
    size = math.prod(shape)
    per_group = 2 * scale_bits if packing.mode == "affine" else 8
    return size * packing.bits + size // packing.group_size * per_group


def _offers(shape: tuple[int, ...], forms: Sequence[Packing], losses: Sequence[float], scale_bits: int) -> list[Offer]:
    found = [Offer(p, bits_of(shape, p, scale_bits), loss) for p, loss in zip(forms, losses, strict=True)]
    return sorted(found, key=lambda offer: (offer.bits, offer.loss))


def choose_forms(sensitivity: Sensitivity, target_bpw: float) -> dict[str, Offer]:
    """The form of each matrix with the least loss in all, at no more than `target_bpw` bits per weight of the model.

    Every matrix starts with its smallest form. The upgrade that takes away most loss per bit goes next, among those
    along the lower convex hull of (bits, loss) of each matrix. On a hull the gain per bit only falls, so the upgrades
    made so far are always the best ones, and they minimise loss + c · bits over all assignments, for c the gain per
    bit of the last: no assignment of at most as many bits has less loss. What is left is too little for the next
    upgrade; smaller ones further down may still fit and are taken in the same order, so the result is within one
    upgrade's gain of the optimum.

    Raises InvalidRequestError when the smallest forms together are larger.
    """
    weights = sensitivity.other_weights + sum(math.prod(shape) for shape in sensitivity.shapes.values())
    hulls = {path: _hull(offers) for path, offers in sensitivity.offers.items()}
    used = sensitivity.other_bits + sum(hull[0].bits for hull in hulls.values())
    budget = target_bpw * weights
    if used > budget:
        raise InvalidRequestError(
            f"the target is {target_bpw:g} bits per weight, but the smallest forms take {used / weights:.3f}",
            param="target_bpw",
        )
    place = dict.fromkeys(hulls, 0)
    queue = [(-_gain(hull, 0), path) for path, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(queue)
    while queue:
        _, path = heapq.heappop(queue)
        hull, at = hulls[path], place[path]
        more = hull[at + 1].bits - hull[at].bits
        if used + more > budget:
            continue
        used += more
        place[path] = at + 1
        if at + 2 < len(hull):
            heapq.heappush(queue, (-_gain(hull, at + 1), path))
    return {path: hull[place[path]] for path, hull in hulls.items()}


def _gain(hull: Sequence[Offer], at: int) -> float:
    """Loss that the next form takes away per bit."""
    return (hull[at].loss - hull[at + 1].loss) / (hull[at + 1].bits - hull[at].bits)


def _hull(offers: Sequence[Offer]) -> list[Offer]:
    """The forms on the lower convex hull: those that are the best for some price of a bit."""
    hull: list[Offer] = []
    for offer in offers:
        if hull and (offer.loss >= hull[-1].loss or offer.bits == hull[-1].bits):
            continue
        while len(hull) > 1 and _gain([hull[-1], offer], 0) >= _gain(hull[-2:], 0):
            hull.pop()
        hull.append(offer)
    return hull


def plan_for(sensitivity: Sensitivity, target_bpw: float) -> Plan:
    """`choose_forms` as a recipe. The form of most weights is its default; the plan can be written as TOML."""
    chosen = choose_forms(sensitivity, target_bpw)
    sizes: dict[Packing, int] = {}
    for path, offer in chosen.items():
        sizes[offer.packing] = sizes.get(offer.packing, 0) + math.prod(sensitivity.shapes[path])
    default = max(sizes, key=lambda packing: sizes[packing])
    patterns = [(path, offer.packing) for path, offer in chosen.items() if offer.packing != default]
    return Plan(f"{target_bpw:g} bits per weight by sensitivity", default, patterns)


def predicted_loss(chosen: Mapping[str, Offer]) -> float:
    """KL divergence in nats per token that the choice is expected to give, losses simply added."""
    return sum(offer.loss for offer in chosen.values())


def bits_per_weight(sensitivity: Sensitivity, chosen: Mapping[str, Offer]) -> float:
    """Of the whole model, with what isn't packed."""
    weights = sensitivity.other_weights + sum(math.prod(shape) for shape in sensitivity.shapes.values())
    return (sensitivity.other_bits + sum(offer.bits for offer in chosen.values())) / weights
