"""Curves as SVG, for a page that needs no script and no other file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLOURS = {"update": "#06c", "evaluation": "#c30"}
WIDTH, HEIGHT = 800, 220
LEFT, BELOW, EDGE = 80, 22, 8
"""Room for the values, for the updates, and at the other sides."""


def drawing(name: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """(update, value) of each kind in COLOURS as a line, evaluations with dots.

    The axes say the first and last update, the lowest and highest value. `name` says the unit.
    """
    finite = {kind: [(x, y) for x, y in curve if math.isfinite(y)] for kind, curve in curves.items()}
    points = [point for curve in finite.values() for point in curve]
    if not points:
        return "<p>nothing recorded</p>"
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: int, y: float) -> tuple[float, float]:
        across = (x - left) / ((right - left) or 1)
        # A value that never changes runs through the middle.
        up = (y - low) / (high - low) if low < high else 0.5
        return LEFT + (WIDTH - LEFT - EDGE) * across, HEIGHT - BELOW - (HEIGHT - BELOW - EDGE) * up

    lines = [
        _line([place(*point) for point in curve], COLOURS[kind], dots=kind == "evaluation" or len(curve) == 1)
        for kind, curve in finite.items()
    ]
    values = [(HEIGHT - BELOW, low), (EDGE + 12, high)] if low < high else [((HEIGHT - BELOW) // 2, low)]
    texts = [_text(LEFT - 8, y, _said(name, value), end=True) for y, value in values]
    if left < right:
        texts.append(_text(LEFT, HEIGHT - 4, f"update {left}"))
    texts.append(_text(WIDTH - EDGE, HEIGHT - 4, str(right), end=True))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13">{"".join(lines)}'
        f'<g fill="currentColor">{"".join(texts)}</g></svg>'
    )


def _line(points: Sequence[tuple[float, float]], colour: str, *, dots: bool) -> str:
    at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    circles = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points] if dots else []
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{at}"/>{"".join(circles)}'


def _text(x: int, y: int, text: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x}" y="{y}"{anchor}>{text}</text>'


def _said(name: str, value: float) -> str:
    return f"{value / 1e9:.3g} GB" if name.endswith("_bytes") else f"{value:.4g}"
