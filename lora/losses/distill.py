"""Distillation: the student learns the teacher's distribution at the supervised positions, in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.losses.log_probs import Scorer, Supervised, log_prob

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlxinfer.lora.types import Batch


class DistillLoss:
    """(1 - w) · T² · KL(teacher ‖ student) at temperature T + w · cross entropy with the targets, Hinton et al. 2015.

    Summed over supervised positions and counted by their weights. T² keeps the gradient's size as T changes.
    """

    def __init__(self, teacher: nn.Module, *, temperature: float = 1.0, hard_weight: float = 0.0) -> None:
        """`hard_weight` is w, 0 to 1. The teacher is put into evaluation mode and gets no gradient."""
        if not temperature > 0:
            raise InvalidRequestError(f"temperature is {temperature}; it must be above 0", param="temperature")
        if not 0 <= hard_weight <= 1:
            raise InvalidRequestError(f"hard_weight is {hard_weight}; it must be 0 to 1", param="hard_weight")
        teacher.eval()
        self._teacher, self._temperature, self._hard = teacher, temperature, hard_weight
        self._scorer, self._teachers = Scorer(), Scorer()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, Σ weight). Raises InvalidRequestError where the vocabularies differ."""
        supervised = Supervised(batch)
        split, teacher = self._scorer.split(model), self._teachers.split(self._teacher)
        if split.vocab_size != teacher.vocab_size:
            raise InvalidRequestError(
                f"the teacher has {teacher.vocab_size:,} tokens, the student {split.vocab_size:,}: "
                "their distributions cannot be compared"
            )
        taught = mx.stop_gradient(self._teachers.hidden(self._teacher, batch, supervised))
        # Before the student runs: what the teacher's layers held is gone by then.
        mx.eval(taught)

        def score(logits: mx.array, states: mx.array, targets: mx.array) -> mx.array:
            kl = _divergence(mx.stop_gradient(teacher.head(states)), logits, self._temperature)
            if self._hard == 0:
                return kl
            return (1 - self._hard) * kl - self._hard * log_prob(logits, targets)

        found = self._scorer(model, batch, supervised, score, [taught, supervised.targets])
        return (found * supervised.weights).sum(), supervised.weights.sum()


def _divergence(teacher: mx.array, student: mx.array, temperature: float) -> mx.array:
    """T² · KL(softmax(teacher / T) ‖ softmax(student / T)) of logits [n, vocab] → [n] float32."""
    theirs, ours = (logits.astype(mx.float32) / temperature for logits in (teacher, student))
    theirs = theirs - mx.logsumexp(theirs, axis=-1, keepdims=True)
    ours = ours - mx.logsumexp(ours, axis=-1, keepdims=True)
    # A token that the teacher rules out costs nothing, even where the student rules it out too.
    gap = mx.where(mx.isfinite(theirs), theirs - ours, 0.0)
    return temperature**2 * (mx.exp(theirs) * gap).sum(axis=-1)
