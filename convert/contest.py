"""A plan by sensitivity against the uniform form of its size: both are tried on text, and the better one is kept.

Sensitivities are estimates, for small changes, that add up what each matrix costs alone. What they choose may be worse
than the same bits everywhere, and only running the model tells.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.convert.measure import compare
from mlxinfer.convert.quantizing import AFFINE_BITS, AFFINE_GROUPS, describe
from mlxinfer.convert.recipes import Plan
from mlxinfer.convert.sensitivity import bits_of, fitting, packable, plan_for
from mlxinfer.convert.sources.base import Packing

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.nn as nn

    from mlxinfer.convert.calibration import Document
    from mlxinfer.convert.quantizing import Quantizer
    from mlxinfer.convert.sensitivity import Sensitivity
    from mlxinfer.tokenizer import Tokenizer

MAX_TOKENS = 64
"""Of each text."""
ROUNDING = 0.005
"""Bits per weight by which the uniform form may be above: 4 bits in groups of 64 are 4.5 to everybody, norms or not."""


def best_plan(
    model: nn.Module,
    tokenizer: Tokenizer,
    found: Sensitivity,
    target_bpw: float,
    *,
    texts: Sequence[Document],
    quantizer: Quantizer,
    scale_bits: int,
) -> Plan:
    """Of two plans of `target_bpw` bits per weight, or less, the one with the smaller mean KL divergence on `texts`.

    Its name tells both figures. `model`: the one that `found` was measured on; memory for another one is taken.
    Raises InvalidRequestError for a target that can't be reached.
    """
    mixed = plan_for(found, target_bpw)
    rival = uniform_rival(found, target_bpw, scale_bits)
    if rival is None or (rival.default == mixed.default and not mixed.patterns):
        return mixed
    entrants = [
        (divergence(model, tokenizer, plan, found, texts=texts, quantizer=quantizer), plan) for plan in (mixed, rival)
    ]
    # One that gives NaN loses.
    (kept_kl, kept), (other_kl, other) = sorted(entrants, key=lambda entrant: (math.isnan(entrant[0]), entrant[0]))
    told = f"{kept.name} (KL {kept_kl:.4g} on the calibration text; {other.name}: {other_kl:.4g})"
    return dataclasses.replace(kept, name=told)


def uniform_rival(found: Sensitivity, target_bpw: float, scale_bits: int) -> Plan | None:
    """The largest affine form within the target, rounded to two decimals, for all matrices; of several the one of most
    bits."""
    budget = (target_bpw + ROUNDING) * (found.other_weights + sum(math.prod(shape) for shape in found.shapes.values()))
    sizes: dict[Packing, int] = {}
    for packing in (Packing(bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS):
        forms = [(shape, fitting(packing, shape)) for shape in found.shapes.values()]
        sizes[packing] = found.other_bits + sum(bits_of(shape, p, scale_bits) for shape, p in forms if p)
    within = [packing for packing, size in sizes.items() if size <= budget]
    if not within:
        return None
    chosen = max(within, key=lambda packing: (sizes[packing], packing.bits))
    return Plan(f"{describe(chosen)}, throughout", chosen)


def divergence(
    model: nn.Module,
    tokenizer: Tokenizer,
    plan: Plan,
    found: Sensitivity,
    *,
    texts: Sequence[Document],
    quantizer: Quantizer,
) -> float:
    """Mean KL divergence in nats per token of `model` with its matrices rounded as `plan` says."""
    rounded = copy.deepcopy(model)
    for path, module in packable(rounded).items():
        wanted = plan.decide(path, found.shapes[path]) if path in found.shapes else None
        packing = fitting(wanted, found.shapes[path]) if wanted else None
        if packing is not None:
            weight = module["weight"]
            words, scales, biases = quantizer(weight, packing)
            restored = mx.dequantize(words, scales, biases, packing.group_size, packing.bits, packing.mode)
            module["weight"] = restored.astype(weight.dtype)
            mx.eval(module["weight"])
    return compare(model, rounded, tokenizer, texts=texts, max_tokens=MAX_TOKENS).kl_mean
