"""What happened in a run: its records, as curves and as a page."""

from __future__ import annotations

import html
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import replace_file
from mlxinfer.lora.drawing import COLOURS, drawing

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.lora.callbacks import Record

CURVES = {
    "loss": "loss (nats per supervised token)",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
    "peak_memory_bytes": "peak memory",
}


@dataclass(slots=True)
class History:
    """The records of a run, in order, and how it ended."""

    records: list[Record] = field(default_factory=list)
    stopped_early: bool = False
    best_loss: float | None = None
    """The lowest evaluation loss, in nats per supervised token."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What was decided before the first update: packed, rows, updates."""
    digest: str = ""
    """SHA-256 of the final weights."""

    def curve(self, name: str, kind: str = "update") -> list[tuple[int, float]]:
        """(update, value) of every record of a kind that has the value."""
        return [(r["update"], r[name]) for r in self.records if r["kind"] == kind and name in r]

    @property
    def losses(self) -> list[float]:
        """Of each update."""
        return [value for _, value in self.curve("loss")]

    def plot(self, path: Path | None = None) -> Any:
        """A matplotlib figure of loss, learning rate, speed and memory, written to `path` as well if one is given.

        Raises InvalidRequestError without matplotlib.
        """
        try:
            figure = importlib.import_module("matplotlib.figure").Figure(figsize=(12, 7), layout="constrained")
        except ImportError as error:
            raise InvalidRequestError("plot() needs matplotlib: pip install 'mlxinfer[bench]'") from error
        for axes, (name, title) in zip(figure.subplots(2, 2).flat, CURVES.items(), strict=True):
            for kind in ("update", "evaluation"):
                if points := self.curve(name, kind):
                    axes.plot(*zip(*points, strict=True), marker="." if kind == "evaluation" else None, label=kind)
                    axes.legend()
            axes.set_title(title)
            axes.set_xlabel("update")
        if path is not None:
            figure.savefig(path)
        return figure

    def write_report(self, path: Path, title: str) -> None:
        """One HTML page without scripts, foreign files or matplotlib. Raises OSError."""
        name = html.escape(title)
        page = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
            "<style>body{font:16px sans-serif;max-width:60rem;margin:auto;padding:1rem;color-scheme:light dark}"
            "figure{margin:1rem 0}svg{width:100%;border:1px solid #8888}</style>"
            f"<h1>{name}</h1>{self._repr_html_()}</html>\n"
        )
        replace_file(path, page.encode("utf-8", "replace"))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        parts: list[str] = []
        for name, text in CURVES.items():
            curves = {kind: self.curve(name, kind) for kind in COLOURS}
            parts.append(f"<figure><figcaption>{html.escape(text)}</figcaption>{drawing(name, curves)}</figure>")
        samples = [
            f"<p>update {r['update']}: <b>{html.escape(r['prompt'])}</b>{html.escape(r['text'])}</p>"
            for r in self.records
            if r["kind"] == "sample"
        ]
        kinds = [kind for kind in COLOURS if self.curve("loss", kind)]
        legend = " ".join(f'<span style="color:{COLOURS[kind]}">\u2014 {kind}</span>' for kind in kinds)
        return "".join([f"<p>{legend}</p>", *parts, *samples])
