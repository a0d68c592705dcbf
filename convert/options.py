"""What a caller may ask of a conversion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.convert.outcome import Outcome, report_files
from mlxinfer.convert.quantizing import Misfit, Quantizer, Recipe, Uniform, min_max

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mlxinfer.convert.sources.base import Packing


@dataclass(frozen=True)
class ConvertOptions:
    """What is to be made of a source."""

    dtype: str | None = None
    """Of floats and of affine scales; None: the one that most of the source has."""
    packing: Packing | None = None
    """For every matrix; None, and no recipe: as the source has it."""
    recipe: Recipe | None = None
    """Says the packing of each matrix; goes before `packing`."""
    quantizer: Quantizer = min_max
    misfit: Misfit = "smaller"
    max_shard_bytes: int = 5 << 30
    overwrite: bool = False
    documents: Callable[[Outcome], Mapping[str, bytes]] = field(default=report_files)
    """Makes the files that tell of the conversion; they must not depend on when or how fast it ran."""

    def wanted(self) -> Recipe | None:
        """The recipe, whichever way it was given; None keeps what the source has."""
        return self.recipe or (Uniform(self.packing) if self.packing else None)

    def quantizer_name(self) -> str:
        """What tells this quantizer from others: a conversion that another one began isn't resumed."""
        kind: Any = self.quantizer
        named = getattr(kind, "__qualname__", None)
        return f"{kind.__module__}.{named}" if named else repr(kind)
