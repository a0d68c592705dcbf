"""Folders with torch's .bin files and no safetensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.convert.sources.folder import FolderSource
from mlxinfer.convert.sources.safetensors import plain_or_packed

if TYPE_CHECKING:
    from pathlib import Path


class TorchSource(FolderSource):
    """Plain tensors of pytorch_model*.bin; quantized ones have the reader of their method, whatever the files."""

    def __init__(self, folder: Path) -> None:
        super().__init__("torch", folder, lambda store: plain_or_packed(store, folder))
