"""Loss and perplexity over held-out rows, and samples of what the model writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer import upstream
from mlxinfer.errors import InvalidRequestError, TrainingError
from mlxinfer.lora.modes import evaluating
from mlxinfer.lora.parallel import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import mlx.nn as nn

    from mlxinfer.lora.batches import Batches
    from mlxinfer.lora.types import Loss
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


def evaluate(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    ranks: Ranks | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Over every row once, split over the ranks, without dropout; None where `stop` ended it.

    Raises TrainingError for a loss that is no number.
    """
    ranks = ranks or Ranks()
    total = count = 0.0
    with evaluating(model):
        for update in batches.plan(0, ranks.rank, ranks.size):
            for micro in update:
                if stop():
                    return None
                found, supervised = _numbers(*loss(model, batches.batch(micro)))
                if not math.isfinite(found):
                    raise TrainingError(f"evaluation: the loss is {found} in {', '.join(batches.where(micro))}")
                total += found
                count += supervised
    total, count = ranks.sums(total, count)
    if not count:
        raise InvalidRequestError("evaluation: no token of these rows is supervised")
    return Evaluation(total / count, int(count))


def _numbers(*values: mx.array) -> list[float]:
    mx.eval(values)
    return [float(np.array(value)) for value in values]


def sample(model: nn.Module, tokenizer: Tokenizer, prompt: str, max_tokens: int, stop: Sequence[int] = ()) -> str:
    """The likeliest continuation. Draws nothing from the RNG, so that a run is the same with samples and without."""
    forward: Any = model
    ids: list[int] = []
    with evaluating(model):
        cache = upstream.make_cache(model)
        tokens = tokenizer.encode(prompt)
        for _ in range(max_tokens):
            logits = forward(mx.array([tokens]), cache=cache)
            ids.append(int(np.array(mx.argmax(logits[0, -1]))))
            if ids[-1] in stop:
                break
            tokens = ids[-1:]
    return tokenizer.decode(ids)
