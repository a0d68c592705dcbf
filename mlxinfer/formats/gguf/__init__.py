"""GGUF files: a bounded reader, and the way from one to an mlx-lm config, weights and a tokenizer.

`read_gguf` and `plan_gguf` import no mlx; `load_gguf` and its second half `read_weights` do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.formats.gguf.plan import GGUFPlan, plan_gguf
from mlxinfer.formats.gguf.reader import GGUFFile, GGUFTensor, read_gguf

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.model import GGUFModel, load_gguf, read_weights

__all__ = [
    "GGUFFile",
    "GGUFModel",
    "GGUFPlan",
    "GGUFTensor",
    "load_gguf",
    "plan_gguf",
    "read_gguf",
    "read_weights",
]


def __getattr__(name: str) -> Any:
    if name in ("GGUFModel", "load_gguf", "read_weights"):
        from mlxinfer.formats.gguf import model

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
