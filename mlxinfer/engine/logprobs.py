"""How likely tokens were to the model itself: computed beside the sampling, read with the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxinfer.types import TokenLogprob


@dataclass(slots=True)
class Logprobs:
    """Of some rows, not yet read: of the chosen tokens [R], of the likeliest [R, k], and the ids of these [R, k]."""

    wanted: list[int]
    """How many of the likeliest each row asked for."""
    tokens: mx.array
    chosen: mx.array
    top: mx.array
    top_ids: mx.array

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, wanted: list[int]) -> Logprobs:
        """From the model's logits [R, vocab] and the tokens [R] that follow. Nothing is evaluated."""
        logits = logits.astype(mx.float32)
        likely = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        tokens = tokens.astype(mx.uint32)
        chosen = mx.take_along_axis(likely, tokens[:, None], axis=-1)[:, 0]
        count = min(max(wanted), logits.shape[-1])
        if count == 0:
            none = mx.zeros((len(wanted), 0))
            return cls(wanted, tokens, chosen, none, none.astype(mx.uint32))
        if count < logits.shape[-1]:
            ids = mx.argpartition(-likely, count - 1, axis=-1)[:, :count]
        else:
            ids = mx.broadcast_to(mx.arange(count), likely.shape)
        values = mx.take_along_axis(likely, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        top, top_ids = (mx.take_along_axis(a, order, axis=-1) for a in (values, ids))
        return cls(wanted, tokens, chosen, top, top_ids)

    def arrays(self) -> list[mx.array]:
        """What has to be computed."""
        return [self.tokens, self.chosen, self.top, self.top_ids]

    def read(self) -> list[TokenLogprob]:
        """Wait for them; one for each row."""
        mx.eval(self.arrays())
        made: list[TokenLogprob] = []
        rows = zip(*(a.tolist() for a in self.arrays()), self.wanted, strict=True)  # pyright: ignore[reportArgumentType]
        for token, chosen, top, ids, wanted in rows:
            made.append(TokenLogprob(token, chosen, tuple(zip(ids[:wanted], top[:wanted], strict=True))))
        return made
