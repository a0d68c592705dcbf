"""What a window was like when it was closed: where it stood, how large, how far zoomed. A small JSON file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import json_bytes, read_json_object, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SMALLEST = (360, 420)
"""Points; the page works from 360 wide."""
LARGEST = 20_000
ZOOMS = (0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
GRIP = (80, 30)
"""Points of a window's top that have to be on a screen, for a hand to take hold of it."""

Box = tuple[int, int, int, int]
"""x, y, width, height in points."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """Points. `x` and `y` as the platform counts them; None lets it choose."""

    width: int = 1180
    height: int = 820
    x: int | None = None
    y: int | None = None
    zoom: float = 1.0
    maximized: bool = False

    @property
    def box(self) -> Box | None:
        return None if self.x is None or self.y is None else (self.x, self.y, self.width, self.height)


def read(file: Path) -> Frame:
    """The frame in `file`; the usual one where there is none, or where it holds anything else."""
    try:
        values = read_json_object(file, limit=4096) or {}
    except (ModelFileError, OSError):  # a window's place is not worth a word to the user
        return Frame()
    usual = Frame()
    x, y = (_whole(values.get(name), -LARGEST, LARGEST) for name in ("x", "y"))
    zoom = values.get("zoom")
    return Frame(
        width=_whole(values.get("width"), SMALLEST[0], LARGEST) or usual.width,
        height=_whole(values.get("height"), SMALLEST[1], LARGEST) or usual.height,
        x=None if y is None else x,
        y=None if x is None else y,
        zoom=zoom if zoom in ZOOMS and not isinstance(zoom, bool) else usual.zoom,
        maximized=values.get("maximized") is True,
    )


def _whole(value: Any, low: int, high: int) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    return value if fits else None


def write(file: Path, frame: Frame) -> None:
    """Replace `file`. A disk that is full or read-only costs the window's place, nothing else."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json_bytes(dataclasses.asdict(frame), indent=1))


def can_be_grasped(box: Box, screens: Iterable[Box]) -> bool:
    """Whether enough of the title bar is on one of `screens`: the one it was on may be gone. y counts down."""
    x, y, width, _ = box
    return any(
        min(x + width, left + wide) - max(x, left) >= GRIP[0] and top <= y + GRIP[1] <= top + high
        for left, top, wide, high in screens
    )


def zoomed(zoom: float, step: int) -> float:
    """The zoom `step` places along ZOOMS; step 0 is back to 1."""
    return ZOOMS[min(max(ZOOMS.index(nearest(zoom)) + step, 0), len(ZOOMS) - 1)] if step else 1.0


def nearest(zoom: float) -> float:
    """The one of ZOOMS that a browser's own number means."""
    return min(ZOOMS, key=lambda known: math.fabs(known - zoom))
