"""Checkpoints that are converted once, into the cache, before they are loaded.

Folders with torch's .bin files, or in a kind of quantization that mlx-lm does not read, could not be loaded otherwise.
A GGUF file could, and small ones are; but its tensors are laid out anew at each start, which for a large one takes
longer than reading a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING

from mlxinfer.cli import output
from mlxinfer.types import ProgressEvent
from mlxinfer.zoo.checks import needs_conversion

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.types import Progress
    from mlxinfer.zoo.files import ModelFiles

GGUF_BYTES = 2 << 30
"""GGUF files larger than this are converted."""


def loadable(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """The same files, or those of the conversion in the cache, which is made if it isn't there.

    Raises what `mlxinfer.convert` raises: ModelFileError, UnsupportedModelError, ConversionError, …
    """
    if not _needs_conversion(files):
        return files
    from mlxinfer.convert import ConvertOptions, convert, open_source

    with contextlib.closing(open_source(files.path)) as source:
        stem = re.sub(r"[^\w.-]+", "-", files.path.name).strip("-.")[:80]
        folder = settings.cache_dir / "converted" / f"{stem}-{source.fingerprint()[-16:]}"
        if not folder.is_dir():
            output.say(f"Converting {files.name} once, into {folder} …", dim=True)
            convert(source, folder, ConvertOptions(), progress=progress)
    if progress is not None:
        progress(ProgressEvent("resolve", label=files.origin))
    size = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    return dataclasses.replace(files, kind="folder", path=folder, size_bytes=size)


def _needs_conversion(files: ModelFiles) -> bool:
    if files.kind == "gguf":
        return files.size_bytes > GGUF_BYTES
    return needs_conversion(files.path) is not None
