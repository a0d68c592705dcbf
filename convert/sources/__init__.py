"""Readers of published checkpoints, one per format, all behind `Source`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.convert.sources.awq import AWQSource
from mlxinfer.convert.sources.bitnet import BitNetSource
from mlxinfer.convert.sources.compressed import CompressedSource
from mlxinfer.convert.sources.folder import has_safetensors, quantization_settings
from mlxinfer.convert.sources.fp8 import Fp8Source
from mlxinfer.convert.sources.gptq import GPTQSource
from mlxinfer.convert.sources.modelopt import ModelOptSource
from mlxinfer.convert.sources.mxfp4 import MXFP4Source
from mlxinfer.convert.sources.safetensors import SafetensorsSource
from mlxinfer.convert.sources.torch_source import TorchSource
from mlxinfer.errors import ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlxinfer.convert.sources.base import Source

__all__ = ["METHODS", "open_source"]


def _unquantized(folder: Path) -> Source:
    return SafetensorsSource(folder) if has_safetensors(folder) else TorchSource(folder)


METHODS: dict[str, Callable[[Path], Source]] = {
    "": _unquantized,
    "awq": AWQSource,
    "bitnet": BitNetSource,
    "compressed-tensors": CompressedSource,
    "fbgemm_fp8": Fp8Source,
    "fp8": Fp8Source,
    "gptq": GPTQSource,
    "modelopt": ModelOptSource,
    "mxfp4": MXFP4Source,
}
"""By quant_method in lower case; "" for a folder that isn't quantized, or by mlx."""


def open_source(path: Path) -> Source:
    """The reader for a model folder or a GGUF file.

    Raises ModelNotFoundError when nothing is there, UnsupportedModelError for a format that no reader is for, and
    what the reader itself raises: ModelFileError, UnsupportedModelError.
    """
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path} is no file or folder")
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if (path.parent / "config.json").exists():
        raise UnsupportedModelError(f"{path} is one file of a model; give its folder, {path.parent}")
    raise UnsupportedModelError(f"{path} is neither a model folder nor a .gguf file")


def _open_folder(folder: Path) -> Source:
    if not (folder / "config.json").exists() or not (has_safetensors(folder) or any(folder.glob("*.bin*"))):
        pieces = sorted(p for p in folder.glob("*.gguf") if "mmproj" not in p.name.lower())
        firsts = [p for p in pieces if "-of-" not in p.name or "-00001-of-" in p.name]
        if len(firsts) == 1:
            return _open_gguf(firsts[0])
        if firsts:
            raise UnsupportedModelError(
                f"{folder} holds several GGUF models; give one: {', '.join(map(_name, firsts))}"
            )
    settings = quantization_settings(folder)
    method = settings.get("quant_method", "")
    reader = METHODS.get(method.lower()) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join(sorted(filter(None, METHODS)))
        raise UnsupportedModelError(
            f"{folder}: quant_method {method!r:.60} is not read; read are: {known}, mlx's own and unquantized weights"
        )
    return reader(folder)


def _open_gguf(path: Path) -> Source:
    # Its tables are only wanted here.
    from mlxinfer.convert.sources.gguf import GGUFSource

    return GGUFSource(path)


def _name(path: Path) -> str:
    return path.name
