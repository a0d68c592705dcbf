"""What the runner runs: a model with what makes its hidden states embeddings or scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.encoders.pooling import Pool

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from mlxinfer.encoders.decoder import DecoderModel
    from mlxinfer.encoders.layers import EncoderModel
    from mlxinfer.encoders.modules import PoolMode
    from mlxinfer.encoders.pooling import Finish


class EmbeddingNetwork:
    """Token ids → embeddings [B, dimensions]."""

    def __init__(self, model: EncoderModel | DecoderModel, pooling: Sequence[PoolMode], finish: Finish) -> None:
        self.model = model
        self._pooling = tuple(pooling)
        self._finish = finish

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Generator[None, None, mx.array]:
        pooled = yield from _pooled(self.model, self._pooling, ids, types, lengths, pieces)
        return self._finish(pooled)


class CrossEncoder:
    """Token ids of pairs → scores [B] from 0 to 1: the sigmoid of what the model's head says."""

    def __init__(self, model: EncoderModel) -> None:
        self.model = model

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Generator[None, None, mx.array]:
        pooling: PoolMode = "mean" if self.model.shape.head_pooling == "mean" else "cls"
        pooled = yield from _pooled(self.model, (pooling,), ids, types, lengths, pieces)
        return mx.sigmoid(self.model.head(pooled).astype(mx.float32))


class YesOrNo:
    """Token ids of prompts → scores [B] from 0 to 1: how likely "yes" is when the answer is "yes" or "no"."""

    def __init__(self, model: DecoderModel, yes: int, no: int) -> None:
        self.model = model
        self._yes = yes
        self._no = no

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Generator[None, None, mx.array]:
        pooled = yield from _pooled(self.model, ("lasttoken",), ids, types, lengths, pieces)
        logits = self.model.logits(pooled).astype(mx.float32)
        return mx.sigmoid(logits[:, self._yes] - logits[:, self._no])


def _pooled(
    model: EncoderModel | DecoderModel,
    pooling: Sequence[PoolMode],
    ids: mx.array,
    types: mx.array | None,
    lengths: Sequence[int],
    pieces: int,
) -> Generator[None, None, mx.array]:
    """Run the model in pieces, pool what it gives."""
    pool = Pool(pooling, lengths)
    parts: Iterator[tuple[int, mx.array] | None] = model.run(ids, types, lengths, pieces)
    for number, part in enumerate(parts):
        if number:
            yield
        if part is not None:
            start, hidden = part
            pool.add(hidden, start)
            if start + hidden.shape[1] < ids.shape[1]:
                mx.eval(pool.held())
    return pool.result()
