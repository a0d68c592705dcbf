"""From what a user asked for to a source and its `ConvertOptions`, and to a name for the result."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer import upstream
from mlxinfer.convert import recipes, report
from mlxinfer.convert.options import ConvertOptions
from mlxinfer.convert.planning import main_dtype
from mlxinfer.convert.quantizing import min_max, packing_of
from mlxinfer.convert.search import recommended, search
from mlxinfer.convert.tracing import parameter_shapes
from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.formats.files import read_regular

if TYPE_CHECKING:
    from mlxinfer.convert.planning import Plan
    from mlxinfer.convert.quantizing import Quantizer, Recipe
    from mlxinfer.convert.sources.base import Source

QUANTIZERS = {"min-max": min_max, "search": recommended}
LEARNED = ("dwq", "awq", "gptq")
"""Recipes that are methods of mlx-lm: they learn from text, with the whole model in memory."""
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
MAX_CARD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """A user's words; None where nothing was said."""

    name: str = ""
    """Of the model, for its card."""
    dtype: str | None = None
    bits: int | None = None
    group_size: int | None = None
    mode: str | None = None
    recipe: str | None = None
    """A recipe's name, a plan in a .toml file, or one of LEARNED."""
    target_bpw: float | None = None
    """Bits per weight of the whole, spent where they are needed most."""
    scales: str = "min-max"
    """One of QUANTIZERS."""
    overwrite: bool = False
    dry_run: bool = False
    """A method that learns is not run: the form that it packs most matrices in is all that is known."""


def prepare(source: Source, wanted: Wanted) -> tuple[Source, ConvertOptions]:
    """What to convert, and how. The source is another one if a method that learns has to run first.

    Raises InvalidRequestError for values that mlx doesn't have or that don't go together.
    """
    _check(wanted)
    dtype = wanted.dtype or main_dtype(source)
    recipe = _recipe(source, wanted, dtype)
    packing = None
    asked = (wanted.bits, wanted.group_size, wanted.mode)
    if any(value is not None for value in asked) or wanted.recipe in LEARNED:
        packing = packing_of(wanted.bits, wanted.group_size, wanted.mode)
    tell = functools.partial(report.documents, source=wanted.name, source_card=_card(source))
    if wanted.recipe in LEARNED and not wanted.dry_run:
        from mlxinfer.convert.whole import learned_source

        assert packing is not None
        source, packing = learned_source(source, wanted.recipe, packing), None
    options = ConvertOptions(
        dtype=dtype,
        packing=None if recipe else packing,
        recipe=recipe,
        quantizer=_quantizer(wanted),
        overwrite=wanted.overwrite,
        documents=tell,
    )
    return source, options


def _quantizer(wanted: Wanted) -> Quantizer:
    """Matrices that a measurement finds insensitive lose less by the search in 2 and 3 bits, too; whole models more."""
    if wanted.scales == "search" and wanted.target_bpw is not None:
        return search
    return QUANTIZERS[wanted.scales]


def _check(wanted: Wanted) -> None:
    """What excludes what."""
    if wanted.target_bpw is not None and not 0 < wanted.target_bpw < math.inf:
        raise InvalidRequestError(f"the target is {wanted.target_bpw} bits per weight", param="target_bpw")
    if wanted.recipe is not None and wanted.target_bpw is not None:
        raise InvalidRequestError("a recipe and a target don't go together: both say the bits", param="target_bpw")
    by_itself = wanted.recipe if wanted.recipe not in LEARNED else None
    for name, value in (("bits", wanted.bits), ("mode", wanted.mode)):
        if value is not None and by_itself is not None:
            raise InvalidRequestError(f"{name} and a recipe don't go together: the recipe says it", param=name)
        if value is not None and wanted.target_bpw is not None:
            raise InvalidRequestError(f"{name} and a target don't go together: the search says it", param=name)
    if wanted.group_size is not None and (wanted.target_bpw is not None or (by_itself or "").endswith(".toml")):
        raise InvalidRequestError("the group size is said by the plan or found by the search", param="group_size")


def packable(source: Source) -> dict[str, tuple[int, ...]]:
    """Paths and weight shapes of the modules that can be packed, in the model's order."""
    model = upstream.empty_model(source.config)
    paths = upstream.quantizable(model)
    return {
        name.removesuffix(".weight"): shape
        for name, shape in parameter_shapes(model).items()
        if name.endswith(".weight") and name.removesuffix(".weight") in paths
    }


def _recipe(source: Source, wanted: Wanted, dtype: str) -> Recipe | None:
    if wanted.target_bpw is not None:
        from mlxinfer.convert.whole import sensitive_recipe

        return sensitive_recipe(source, wanted.target_bpw, _quantizer(wanted), dtype)
    if wanted.recipe is None or wanted.recipe in LEARNED:
        return None
    if wanted.recipe.endswith(".toml"):
        return recipes.read_plan(Path(wanted.recipe), packable(source))
    if wanted.recipe not in recipes.names():
        known = ", ".join((*recipes.names(), *LEARNED))
        raise InvalidRequestError(
            f"no recipe {wanted.recipe!r:.60}; there are {known}, or a plan in a .toml file", param="recipe"
        )
    return recipes.named(wanted.recipe, packable(source), wanted.group_size)


def _card(source: Source) -> str | None:
    """The source's README, whose licence the new card carries on."""
    folder = source.path if source.path.is_dir() else source.path.parent
    try:
        data = read_regular(folder / "README.md", MAX_CARD_BYTES)
    except ModelFileError:
        return None
    return data.decode(errors="replace") if data else None


def default_name(name: str, plan: Plan) -> str:
    """For the destination when none is named: the model's name, "mlx", and the bits or the dtype."""
    stem = re.sub(r"[^\w.-]+", "-", re.split(r"[/\\]", name.rstrip("/\\"))[-1].removesuffix(".gguf")).strip("-.")
    sizes: dict[str, int] = {}
    for item in plan.items:
        p = item.packing
        form = SHORT.get(plan.dtype, plan.dtype) if p is None else f"{p.bits}bit" if p.mode == "affine" else p.mode
        sizes[form] = sizes.get(form, 0) + math.prod(item.output.shape)
    return f"{stem or 'model'}-mlx-{max(sizes, key=lambda form: sizes[form])}"
