"""Loss and perplexity over held-out rows, and samples of what the model writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlxinfer import upstream
from mlxinfer.errors import InvalidRequestError, TrainingError
from mlxinfer.lora.parallel import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.batches import Batches
    from mlxinfer.lora.types import Batch, Loss
    from mlxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Nats per supervised token, and over how many."""

    loss: float
    num_targets: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def cross_entropy(model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
    """(sum, count) over the whole logits at once, for rows of one segment: the plain form of the supervised loss."""
    logits = model(batch.inputs).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, batch.targets)
    # Where a weight is 0 nothing counts, not even a NaN times 0.
    return mx.where(batch.weights > 0, losses * batch.weights, 0.0).sum(), batch.weights.sum()


def evaluate(model: nn.Module, batches: Batches, loss: Loss, ranks: Ranks | None = None) -> Evaluation:
    """Over every row once, split over the ranks, without dropout. Raises TrainingError for a loss that is no number."""
    ranks = ranks or Ranks()
    total = count = 0.0
    training = model.training
    model.eval()
    try:
        for update in batches.plan(0, ranks.rank, ranks.size):
            for items in update:
                found, supervised = loss(model, batches.batch(items))
                mx.eval(found, supervised)
                if not math.isfinite(found.item()):
                    raise TrainingError(f"evaluation: the loss is {found.item()} in {', '.join(batches.where(items))}")
                total += float(found.item())
                count += float(supervised.item())
    finally:
        model.train(training)
    total, count = ranks.sums(total, count)
    if not count:
        raise InvalidRequestError("evaluation: no token of these rows is supervised")
    return Evaluation(total / count, int(count))


def sample(model: nn.Module, tokenizer: Tokenizer, prompt: str, max_tokens: int, stop: Sequence[int] = ()) -> str:
    """The likeliest continuation. Draws nothing from the RNG, so that a run is the same with samples and without."""
    training = model.training
    model.eval()
    ids: list[int] = []
    try:
        cache = upstream.make_cache(model)
        tokens = tokenizer.encode(prompt)
        for _ in range(max_tokens):
            logits = model(mx.array([tokens]), cache=cache)
            ids.append(int(mx.argmax(logits[0, -1]).item()))
            if ids[-1] in stop:
                break
            tokens = ids[-1:]
    finally:
        model.train(training)
    return tokenizer.decode(ids)
