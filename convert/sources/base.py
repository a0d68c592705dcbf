"""What every checkpoint format is read as: named tensors of floats, some of which can also be had packed.

A reader looks at headers only when it is made, and gives one tensor at a time afterwards, so that a checkpoint larger
than memory can be converted. Values are numpy: readers are called back from mlx's own threads, where nothing may wait
for an array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

FloatType = Literal["float32", "float16", "bfloat16"]
Handling = Literal["exact", "near", "requantized"]
"""What becomes of a packed tensor's values: every one kept; codes kept and scales rounded; computed anew."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A form in which mlx holds a quantized matrix."""

    bits: int
    group_size: int
    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"] = "affine"


@dataclass(frozen=True, slots=True)
class Logical:
    """One tensor as the model's code names it, whatever the files make it of."""

    name: str
    """Under which the model's `sanitize` of mlx-lm expects it: as published on the hub, ending in .weight or .bias."""
    shape: tuple[int, ...]
    """Of the floats. Three dimensions: experts, rows, columns."""
    dtype: str
    """What `read` gives: a FloatType, or an integer type's name for tables that are no weights."""
    nbytes: int
    """Of the file, that have to be read for it."""
    made_of: tuple[str, ...]
    """Tensors of the file. Each belongs to one Logical, or is dropped for a reason."""
    packing: Packing | None = None
    """It can be had packed so, its codes kept."""
    handling: Handling = "exact"
    note: str = ""
    """For the report: what was done to it, where that isn't plain."""


@dataclass(frozen=True, slots=True)
class PackedArrays:
    """A quantized matrix as mlx lays it out, leading dimensions first."""

    weight: np.ndarray
    """uint32 [..., rows, columns * bits / 32]."""
    scales: np.ndarray
    """[..., rows, columns / group_size]: float32 in affine mode, uint8 in the others."""
    biases: np.ndarray | None
    """As scales, in affine mode only."""


class Source(Protocol):
    """A checkpoint that is open. Making one raises ModelFileError or UnsupportedModelError, as do its methods."""

    kind: str
    """For example "safetensors", "gguf", "gptq"."""
    path: Path
    config: Mapping[str, Any]
    """config.json of mlx-lm's architecture, without "quantization" and "quantization_config"."""
    tensors: Mapping[str, Logical]
    """By `Logical.name`."""
    dropped: Mapping[str, str]
    """Tensors of the file that nothing is made of, and why."""
    extras: Mapping[str, bytes | Path]
    """Other files of the model by their names at the destination: tokenizer.json, generation_config.json, …"""
    notes: Sequence[str]
    """For the report: what holds for the whole."""

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """The tensor as floats of its shape and dtype; bfloat16 as its bits in uint16. `part`: that expert only."""
        ...

    def read_packed(self, name: str, part: int | None = None) -> PackedArrays:
        """The tensor packed as its `packing` says."""
        ...

    def fingerprint(self) -> str:
        """Differs when the files do, as far as names, sizes, times and headers tell."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...
