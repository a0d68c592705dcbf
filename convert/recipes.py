"""Recipes that treat layers differently: named ones, plans in TOML, and what the search for sensitive layers gives.

All of them are a `Plan`: a form for every matrix and, in order, patterns of module paths with other forms, of which the
last that matches decides. A plan is made for the modules of one model, so a pattern that matches none is an error and
not a surprise.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mlxinfer.convert.quantizing import packing_of
from mlxinfer.errors import InvalidRequestError, ModelFileError
from mlxinfer.formats.files import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlxinfer.convert.sources.base import Packing

MAX_PLAN_BYTES = 4 << 20
MAX_PATTERNS = 10_000
FLOAT = "float"
"""What a plan says of a module that isn't packed."""
FORM_KEYS = ("bits", "group_size", "mode")
MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
"""mlx-lm's recipes: bits of most matrices, and of some of v_proj and down_proj and of the head."""
ENDS = {"ends_2_6": (2, 6), "ends_3_6": (3, 6), "ends_4_6": (4, 6), "ends_4_8": (4, 8)}
"""Bits of the layers, and of the embeddings and the head."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe out of a default and patterns."""

    name: str
    default: Packing | None
    """None: floats."""
    patterns: Sequence[tuple[str, Packing | None]] = ()
    """Globs over module paths, in which * matches dots too; the last that matches decides."""

    def decide(self, path: str, shape: tuple[int, ...]) -> Packing | None:
        """The form for the module at `path`."""
        for pattern, packing in reversed(self.patterns):
            if pattern == path or fnmatchcase(path, pattern):
                return packing
        return self.default

    def check(self, modules: Mapping[str, tuple[int, ...]]) -> None:
        """Raises InvalidRequestError for a pattern that matches none of `modules`."""
        for pattern, _ in self.patterns:
            if pattern not in modules and not any(fnmatchcase(path, pattern) for path in modules):
                some = ", ".join(list(modules)[:3])
                raise InvalidRequestError(
                    f"plan {self.name}: {pattern!r} matches no module; the paths look like {some}", param="recipe"
                )

    def to_toml(self) -> str:
        """The plan as `read_plan` reads it."""
        lines = [f"name = {json.dumps(self.name)}", f"default = {_as_toml(self.default)}"]
        if self.patterns:
            lines += ["", "[layers]", *(f"{json.dumps(p)} = {_as_toml(packing)}" for p, packing in self.patterns)]
        return "\n".join(lines) + "\n"


def names() -> list[str]:
    """Of the recipes that `named` knows."""
    return [*MIXED, *ENDS]


def named(name: str, modules: Mapping[str, tuple[int, ...]], group_size: int | None = None) -> Plan:
    """One of mlx-lm's recipes or of ours. `modules`: paths and weight shapes of all that can be packed, in order.

    Raises InvalidRequestError for an unknown name, or a model that the recipe doesn't fit.
    """
    if name in MIXED:
        low, high = (packing_of(bits, group_size, None) for bits in MIXED[name])
        chosen = [path for path in modules if "lm_head" in path] + _more_bits(name, modules)
        return Plan(name, low, [(path, high) for path in dict.fromkeys(chosen)])
    if name in ENDS:
        low, high = (packing_of(bits, group_size, None) for bits in ENDS[name])
        return Plan(name, low, [(path, high) for path in ends(modules)])
    raise InvalidRequestError(f"no recipe {name!r:.60}; there are {', '.join(names())}", param="recipe")


def uniform(
    packing: Packing | None,
    modules: Mapping[str, tuple[int, ...]],
    *,
    embeddings: Packing | None = None,
    head: Packing | None = None,
) -> Plan:
    """The same form for all, with another for the embeddings or for the head where one is given.

    A model that ties the two has embeddings only. Raises InvalidRequestError where there is nothing to apply one to.
    """
    patterns: list[tuple[str, Packing | None]] = []
    for what, wanted, found in (
        ("embeddings", embeddings, [path for path in ends(modules) if not _is_head(path)]),
        ("head", head, [path for path in ends(modules) if _is_head(path)]),
    ):
        if wanted is not None and not found:
            raise InvalidRequestError(f"the model has no {what} of its own", param=what)
        patterns += [(path, wanted) for path in found] if wanted is not None else []
    return Plan("uniform", packing, patterns)


def ends(modules: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The token embeddings and the head: the matrices outside the layers with as many rows as the vocabulary has."""
    outside = {path: shape for path, shape in modules.items() if not any(p.isdigit() for p in path.split("."))}
    rows = max((shape[-2] for shape in outside.values()), default=0)
    return [path for path, shape in outside.items() if shape[-2] == rows]


def _is_head(path: str) -> bool:
    return path.rsplit(".", 1)[-1] in {"lm_head", "head", "output", "embed_out", "ff_out"}


def _more_bits(name: str, modules: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The values and down projections of the first and last eighth of the layers and of every third between."""
    down = [path.split(".") for path in modules if "down_proj" in path]
    place = next((i for i, part in enumerate(down[0]) if part.isdigit()), None) if down else None
    if place is None:
        raise InvalidRequestError(
            f"the recipe {name} needs layers with a down_proj; the model has none", param="recipe"
        )
    layer = {
        path: int(parts[place]) for path in modules if len(parts := path.split(".")) > place and parts[place].isdigit()
    }
    count = 1 + max(layer.values())
    eighth = count // 8
    chosen = [i for i in range(count) if i < eighth or i >= 7 * count // 8 or (i - eighth) % 3 == 2]
    wanted = ("v_proj", "v_a_proj", "v_b_proj", "down_proj")
    return [path for path, i in layer.items() if i in chosen and any(part in path for part in wanted)]


def read_plan(file: Path, modules: Mapping[str, tuple[int, ...]]) -> Plan:
    """A plan in TOML, checked against the modules of the model.

        name = "careful"
        default = { bits = 4, group_size = 64 }

        [layers]
        "*.v_proj" = { bits = 6 }
        "lm_head" = "float"

    Raises InvalidRequestError naming the file and the key.
    """
    try:
        data = read_regular(file, MAX_PLAN_BYTES)
        if data is None:
            raise InvalidRequestError(f"the plan can't be read: {file} isn't there", param="recipe")
        values = tomllib.loads(data.decode("utf-8"))
    except (OSError, ModelFileError) as error:
        raise InvalidRequestError(f"the plan can't be read: {error}", param="recipe") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{file} is no TOML: {error}", param="recipe") from error
    _check_keys(values, ("name", "default", "layers"), str(file))
    layers = values.get("layers", {})
    name = values.get("name", file.stem)
    if not isinstance(layers, dict) or not isinstance(name, str):
        raise InvalidRequestError(f'{file}: "name" is a string and "layers" a table', param="recipe")
    if len(layers) > MAX_PATTERNS:
        raise InvalidRequestError(
            f"{file} has {len(layers):,} patterns; at most {MAX_PATTERNS:,} are read", param="recipe"
        )
    default = _form(values.get("default", {}), f"{file}: default")
    plan = Plan(
        name, default, [(path, _form(form, f"{file}: layers.{json.dumps(path)}")) for path, form in layers.items()]
    )
    plan.check(modules)
    return plan


def _form(value: Any, where: str) -> Packing | None:
    if value == FLOAT:
        return None
    if not isinstance(value, dict):
        raise InvalidRequestError(f'{where} is {value!r:.60}; "float" or a table of {", ".join(FORM_KEYS)} is expected')
    _check_keys(value, FORM_KEYS, where)
    for key, kind in (("bits", int), ("group_size", int), ("mode", str)):
        if key in value and (not isinstance(value[key], kind) or isinstance(value[key], bool)):
            raise InvalidRequestError(f"{where}.{key} is {value[key]!r:.60}; {kind.__name__} is expected", param=key)
    try:
        return packing_of(value.get("bits"), value.get("group_size"), value.get("mode"))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}", param=error.param) from None


def _check_keys(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise InvalidRequestError(f"{where}: unknown key {key!r:.60}; known are {', '.join(known)}", param="recipe")


def _as_toml(packing: Packing | None) -> str:
    if packing is None:
        return json.dumps(FLOAT)
    if packing.mode != "affine":
        return f'{{ mode = "{packing.mode}" }}'
    return f"{{ bits = {packing.bits}, group_size = {packing.group_size} }}"
