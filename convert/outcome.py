"""What a conversion did, parameter by parameter, and the file that says so."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer import __version__, upstream
from mlxinfer.formats.files import json_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from mlxinfer.convert.planning import Item, Plan, Treatment
    from mlxinfer.convert.sources.base import Packing, Source

REPORT = "conversion.json"


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one parameter."""

    name: str
    source: tuple[str, ...]
    """Tensors of the source's files that it is made of."""
    shape: tuple[int, ...]
    """Of its values."""
    packing: Packing | None
    dtype: str
    """Of its floats, or of its scales."""
    nbytes: int
    """As written, scales included."""
    handling: Treatment
    """Of the values."""
    note: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A conversion that was done, or, before it is, as it was planned."""

    folder: Path
    source: str
    """The kind of checkpoint, for example "gguf"."""
    recipe: str
    dtype: str
    decisions: tuple[Decision, ...]
    dropped: Mapping[str, str]
    """Tensors that nothing is made of, and why."""
    notes: tuple[str, ...]
    total_bytes: int
    """Of all tensors."""
    num_weights: int
    plan_hash: str

    @property
    def bits_per_weight(self) -> float:
        """Scales and what stays in floats included."""
        return 8 * self.total_bytes / max(1, self.num_weights)


def outcome_of(plan: Plan, rounded: Collection[str], folder: Path, source: Source) -> Outcome:
    """The plan with what was found out while it was carried out: which parameters were rounded."""
    return Outcome(
        folder=folder,
        source=plan.kind,
        recipe=plan.recipe,
        dtype=plan.dtype,
        decisions=tuple(_decision(item, item.output.name in rounded, source) for item in plan.items),
        dropped=plan.dropped,
        notes=plan.notes,
        total_bytes=plan.total_bytes,
        num_weights=plan.num_weights,
        plan_hash=plan.hash,
    )


def _decision(item: Item, rounded: bool, source: Source) -> Decision:
    names = dict.fromkeys(name for piece in item.output.pieces for name in piece.inputs)
    files = dict.fromkeys(part for name in names for part in source.tensors[name].made_of)
    handling, note = item.handling, item.note
    if rounded and handling in ("exact", "near"):
        what = "scales" if item.packing else "values"
        handling, note = "near", "; ".join(text for text in (note, f"{what} rounded to {item.dtype}") if text)
    packing = item.packing
    return Decision(item.output.name, tuple(files), item.output.shape, packing, item.dtype, item.nbytes, handling, note)


def report_files(outcome: Outcome) -> dict[str, bytes]:
    """conversion.json."""
    return {REPORT: json_bytes(as_dict(outcome), indent=1)}


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON. Without the folder, which may be moved."""
    return {
        "format": 1,
        "versions": {"mlxinfer": __version__, **upstream.versions()},
        "plan": outcome.plan_hash,
        "source": outcome.source,
        "recipe": outcome.recipe,
        "dtype": outcome.dtype,
        "bits_per_weight": round(outcome.bits_per_weight, 4),
        "total_bytes": outcome.total_bytes,
        "num_weights": outcome.num_weights,
        "handled": counts(outcome),
        "notes": list(outcome.notes),
        "dropped": dict(outcome.dropped),
        "tensors": [asdict(decision) for decision in outcome.decisions],
    }


def counts(outcome: Outcome) -> dict[str, int]:
    """Weights by how they were handled."""
    found: dict[str, int] = {}
    for decision in outcome.decisions:
        found[decision.handling] = found.get(decision.handling, 0) + math.prod(decision.shape)
    return found
