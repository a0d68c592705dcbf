"""What the resolver hands on: the files of one model on this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model that is on this machine, whole."""

    name: str
    """The name that resolves to it again."""
    kind: Literal["folder", "gguf"]
    path: Path
    """The model folder (config.json beside *.safetensors), or the .gguf file."""
    origin: str
    """"folder", "file", "package NAME==VERSION", "hub cache", "lm studio", "llama.cpp" or "ollama"."""
    size_bytes: int
    """Of the weights."""


def human_bytes(count: float) -> str:
    """For example "98.4 MB"; powers of ten, as disks and downloads are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_seconds(seconds: float) -> str:
    """For example "40 s", "3 min" or "1 h 20 min"; rounded up."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
