"""The supervised loss: cross entropy at the supervised positions only, in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.lora.losses.log_probs import Scorer, Supervised, log_prob

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from mlxinfer.lora.types import Batch


class SupervisedLoss:
    """A Loss: (-Σ weight · log p(target), Σ weight). Rows may hold several segments."""

    def __init__(self) -> None:
        self._scorer = Scorer()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """Scalars in float32. Raises UnsupportedModelError for packed rows of a model that cannot be packed."""
        supervised = Supervised(batch)
        found = self._scorer(model, batch, supervised, log_prob, [supervised.targets])
        return -(found * supervised.weights).sum(), supervised.weights.sum()
