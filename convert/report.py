"""What a conversion did and cost, for people: a table on the console, and the figures that go into conversion.json."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlxinfer.convert.card import CARD, make_card
from mlxinfer.convert.outcome import REPORT, as_dict
from mlxinfer.convert.quantizing import describe
from mlxinfer.formats.files import json_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.convert.measure import Comparison
    from mlxinfer.convert.outcome import Outcome

MAX_NOTED = 8
"""Lines of notes on the console; conversion.json has them all."""


def documents(outcome: Outcome, *, source: str = "", source_card: str | None = None) -> dict[str, bytes]:
    """The files that tell of a conversion, before anything was measured: conversion.json and the model card.

    `source`: what the user calls it; `source_card`: text of the source's README.md. Nothing in them depends on when
    or how fast the conversion ran.
    """
    return _documents(outcome, None, source, source_card)


def add_measurement(
    outcome: Outcome, comparison: Comparison, *, source: str = "", source_card: str | None = None
) -> None:
    """Write both files again, with the figures, into the outcome's folder. Each is whole at any moment."""
    for name, content in _documents(outcome, comparison, source, source_card).items():
        temporary = outcome.folder / f".{name}.tmp"
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(outcome.folder / name)


def _documents(
    outcome: Outcome, comparison: Comparison | None, source: str, source_card: str | None
) -> dict[str, bytes]:
    report = as_dict(outcome) | {"forms": forms(outcome)}
    if comparison is not None:
        report["measured"] = measured(comparison)
    card = make_card(outcome, comparison, source=source, source_card=source_card)
    return {REPORT: json_bytes(report, indent=1), CARD: card.encode("utf-8", "replace")}


def measured(comparison: Comparison) -> dict[str, Any]:
    """The figures as JSON holds them: no infinities, six digits."""
    values = asdict(comparison) | {"by_kind": dict(comparison.by_kind)}
    return _plain(values)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def forms(outcome: Outcome) -> dict[str, int]:
    """Weights by the form they have in the result, most first."""
    counts: Counter[str] = Counter()
    for decision in outcome.decisions:
        counts[describe(decision.packing) if decision.packing else decision.dtype] += math.prod(decision.shape)
    return dict(counts.most_common())


def lines(outcome: Outcome, comparison: Comparison | None = None) -> list[str]:
    """The report for a console, plain text."""
    weights = max(1, outcome.num_weights)
    rows = [("", "weights", "share")]
    rows += [(form, f"{count:,}", f"{count / weights:.1%}") for form, count in forms(outcome).items()]
    text = [
        f"{outcome.source} → {outcome.folder}",
        f"{outcome.total_bytes / 1e6:,.1f} MB, {outcome.bits_per_weight:.3f} bits per weight, scales included",
        f"recipe: {outcome.recipe}",
        "",
        *_table(rows),
    ]
    notes = [*outcome.notes, *_tensor_notes(outcome)]
    text += ["", *notes[:MAX_NOTED]] if notes else []
    if len(notes) > MAX_NOTED:
        text.append(f"… and {len(notes) - MAX_NOTED} more in {REPORT}")
    if comparison is not None:
        text += ["", *_table([("measured", "source", "converted"), *figures(comparison)])]
    return text


def _tensor_notes(outcome: Outcome) -> list[str]:
    """Each note of a tensor once, with how many have it."""
    counts = Counter(decision.note for decision in outcome.decisions if decision.note)
    return [f"{count} tensors: {note}" for note, count in counts.most_common()]


def figures(comparison: Comparison) -> list[tuple[str, str, str]]:
    """(what, of the source, of the converted model)."""
    kl = comparison
    return [
        ("perplexity", f"{kl.perplexity_source:.3f}", f"{kl.perplexity_converted:.3f}"),
        ("KL divergence, mean", "", f"{kl.kl_mean:.5f}"),
        ("KL divergence, median", "", f"{kl.kl_p50:.5f}"),
        ("KL divergence, 99 %", "", f"{kl.kl_p99:.5f}"),
        ("KL divergence, largest", "", f"{kl.kl_max:.4f}"),
        ("another most likely token", "", f"{kl.flips:.2%}"),
        ("positions compared", "", f"{kl.tokens:,}"),
    ]


def _table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]


def summary(outcome: Outcome, comparison: Comparison | None = None) -> Mapping[str, Any]:
    """The short form for --json: without the list of tensors."""
    report = {key: value for key, value in as_dict(outcome).items() if key != "tensors"}
    report |= {"folder": str(outcome.folder), "forms": forms(outcome)}
    return report | ({"measured": measured(comparison)} if comparison is not None else {})
