"""Any published checkpoint in, an MLX model out: a folder that mlx-lm and this package load.

source = open_source(path)
outcome = convert(source, Path("out"), ConvertOptions(packing=Packing(4, 64)))
"""

from __future__ import annotations

from mlxinfer.convert.job import CancelledError, convert, plan
from mlxinfer.convert.options import ConvertOptions
from mlxinfer.convert.outcome import Decision, Outcome
from mlxinfer.convert.planning import Plan
from mlxinfer.convert.quantizing import Quantizer, Recipe
from mlxinfer.convert.sources import open_source
from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing, Source

__all__ = [
    "CancelledError",
    "ConvertOptions",
    "Decision",
    "Logical",
    "Outcome",
    "PackedArrays",
    "Packing",
    "Plan",
    "Quantizer",
    "Recipe",
    "Source",
    "convert",
    "open_source",
    "plan",
]
