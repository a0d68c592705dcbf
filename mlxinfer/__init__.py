"""mlxinfer: run and fine-tune language models on Apple silicon.

    import mlxinfer
    llm = mlxinfer.load("smollm2-135m")
    print(llm.chat("What is the capital of France?"))

`load_encoder` loads models that make embeddings or rerank. Importing this package imports neither mlx nor mlx-lm;
`load` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer import runtime
from mlxinfer.errors import (
    ContextLengthError,
    DownloadError,
    EngineClosedError,
    EngineError,
    GatedModelError,
    InvalidRequestError,
    MlxinferError,
    ModelFileError,
    ModelNotFoundError,
    OfflineError,
    QueueFullError,
    UnsupportedModelError,
    WontFitError,
)
from mlxinfer.types import Delta, ModelInfo, Reply, SamplingParams, Timings, Usage

if TYPE_CHECKING:
    from mlxinfer.encoders import Embeddings, Encoder, Scores, load_encoder
    from mlxinfer.llm import LLM, load

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ContextLengthError",
    "Delta",
    "DownloadError",
    "Embeddings",
    "Encoder",
    "EngineClosedError",
    "EngineError",
    "GatedModelError",
    "InvalidRequestError",
    "MlxinferError",
    "ModelFileError",
    "ModelInfo",
    "ModelNotFoundError",
    "OfflineError",
    "QueueFullError",
    "Reply",
    "SamplingParams",
    "Scores",
    "Timings",
    "UnsupportedModelError",
    "Usage",
    "WontFitError",
    "load",
    "load_encoder",
]

runtime.preload_blas()


def __getattr__(name: str) -> Any:
    """Import the heavy names on first use."""
    if name in ("load", "LLM"):
        from mlxinfer import llm

        return getattr(llm, name)
    if name in ("load_encoder", "Encoder", "Embeddings", "Scores"):
        from mlxinfer import encoders

        return getattr(encoders, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
