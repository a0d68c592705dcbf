"""GGUF files: a bounded reader, and the way from one to an mlx-lm config, weights and a tokenizer.

`read_gguf` imports no mlx; `load_gguf` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.formats.gguf.reader import GGUFFile, GGUFTensor, read_gguf

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.model import GGUFModel, load_gguf

__all__ = ["GGUFFile", "GGUFModel", "GGUFTensor", "load_gguf", "read_gguf"]


def __getattr__(name: str) -> Any:
    if name in ("GGUFModel", "load_gguf"):
        from mlxinfer.formats.gguf import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
