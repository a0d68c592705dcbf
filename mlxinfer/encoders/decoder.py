"""Decoders that make embeddings or scores: mlx-lm's models without their loop.

A causal token never sees what comes after it, so rows of a batch are padded at their ends without a mask, and a long
text goes through in chunks over mlx-lm's own caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer import upstream
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import mlx.core as mx
    import mlx.nn as nn

MIN_CHUNK = 32
"""Tokens; smaller pieces of a text cost more than they save others."""


class DecoderModel:
    """The layers of a model of mlx-lm's, and its head for those that answer yes or no."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.stack: Any = getattr(model, "model", None)
        if self.stack is None or "embed_tokens" not in self.stack:
            raise UnsupportedModelError(
                f"{type(model).__module__} doesn't give its hidden states; no embeddings can be made with it"
            )

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Iterator[tuple[int, mx.array]]:
        """(position of the first, hidden states [B, C, hidden]) of one chunk of `ids` [B, L] after the other."""
        length = ids.shape[1]
        chunk = max(MIN_CHUNK, -(-length // pieces))
        cache = upstream.make_cache(self.model) if chunk < length else None
        for start in range(0, length, chunk):
            yield start, self.stack(ids[:, start : start + chunk], cache)

    def logits(self, hidden: mx.array) -> mx.array:
        """[B, hidden] → [B, vocab]."""
        head = self.model.lm_head if "lm_head" in self.model else self.stack.embed_tokens.as_linear
        return head(hidden[:, None])[:, 0]


def check_causal(config: Mapping[str, Any], where: str) -> None:
    """Refuse decoders that were retrained to look both ways: mlx-lm's models don't."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{where}: this decoder looks both ways (is_causal is false); that isn't supported")


def decoder_weights(
    config: Mapping[str, Any], weights: Mapping[str, mx.array], *, scores: bool
) -> tuple[dict[str, Any], dict[str, mx.array]]:
    """Config and weights as mlx-lm's classes want them.

    Embedding models are published without the prefix "model." and without a head. Raises ModelFileError for a reranker
    that lacks its head.
    """
    prefixed = any(name.startswith("model.") for name in weights)
    held = {n if prefixed or n.startswith("lm_head.") else f"model.{n}": w for n, w in weights.items()}
    config = dict(config)
    if not config.get("tie_word_embeddings") and "lm_head.weight" not in held:
        if scores:
            raise ModelFileError("a reranker needs its lm_head, which is not among the weights")
        config["tie_word_embeddings"] = True
    return config, held
