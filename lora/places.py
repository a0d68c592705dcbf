"""Where an exchange writes: a folder that must not be there yet, and that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.convert.export.writing import ExportError, appearing, check_destination, synced
from mlxinfer.formats.safetensors import check_safetensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextlib.contextmanager
def new_folder(destination: Path, nbytes: int) -> Iterator[Path]:
    """A folder to fill that becomes `destination`.

    Raises InvalidRequestError where something is in the way, and ExportError.
    """
    check_destination(destination, nbytes)
    with appearing(destination, folder=True) as work:
        yield work


def put_tensors(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """A safetensors file whose bytes are on the disk. Raises ExportError."""
    try:
        mx.save_safetensors(str(path), dict(tensors), metadata=dict(metadata))
    except RuntimeError as error:
        raise ExportError(f"{path.name} cannot be written: {error}; nothing of it is left") from error
    check_safetensors(path)  # mlx may write a torn file to a full disk and say nothing
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_text(path: Path, text: str) -> None:
    """A new file whose bytes are on the disk. Raises OSError."""
    with synced(path) as file:
        file.write(text.encode())
