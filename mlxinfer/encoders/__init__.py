"""Models that make embeddings or rerank: BERT's family on mlx, and decoders of mlx-lm's that were trained for it.

with load_encoder("all-minilm-l6-v2") as encoder:
    encoder.embed(["a text", "another"]).vectors

Importing this package imports no mlx; `kinds` tells from a model's files whether it belongs here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.encoders.kinds import EncoderKind, encoder_kind

if TYPE_CHECKING:
    from mlxinfer.encoders.encoder import Embeddings, Encoder, Scores, load_encoder

__all__ = ["Embeddings", "Encoder", "EncoderKind", "Scores", "encoder_kind", "load_encoder"]


def __getattr__(name: str) -> Any:
    """Import the heavy names on first use."""
    if name in ("Embeddings", "Encoder", "Scores", "load_encoder"):
        from mlxinfer.encoders import encoder

        return getattr(encoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
