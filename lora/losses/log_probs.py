"""Log-probabilities of the supervised targets of a batch, and sums of them over its examples."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer.lora.attention import in_blocks
from mlxinfer.lora.losses.chunked import chunk_rows, scores
from mlxinfer.lora.losses.split import Split
from mlxinfer.lora.segments import isolated

if TYPE_CHECKING:
    from collections.abc import Callable

    import mlx.nn as nn

    from mlxinfer.lora.types import Batch


class Supervised:
    """The supervised positions of a batch, in reading order: [n] each, n may be 0."""

    def __init__(self, batch: Batch) -> None:
        weights = np.array(batch.weights)
        rows, columns = np.nonzero(weights)
        flat = rows * weights.shape[1] + columns
        self.positions = mx.array(flat.astype(np.int32))
        self.targets = batch.targets.reshape(-1)[self.positions]
        self.weights = batch.weights.reshape(-1)[self.positions]
        segments = np.array(batch.segments)
        before = np.concatenate([[0], np.cumsum(segments.max(axis=1))])
        self.num_examples = int(before[-1])
        """Segments of the batch."""
        self.examples = (before[rows] + segments[rows, columns] - 1).astype(np.int32)
        """Of each position, the number of its segment, counted row by row."""

    def __len__(self) -> int:
        return self.targets.shape[0]


class Scorer:
    """Scores of a model's supervised positions. It keeps what it found out about the model it was last used on."""

    def __init__(self) -> None:
        self._split: Split | None = None

    def __call__(
        self,
        model: nn.Module,
        batch: Batch,
        supervised: Supervised,
        score: Callable[..., mx.array],
        extras: list[mx.array],
    ) -> mx.array:
        """[n] float32. In training mode the slope is taken on the way: see chunked.py."""
        split = self.split(model)
        hidden = self.hidden(model, batch, supervised)
        if not len(supervised):
            # Still a function of the model: its gradient is zero.
            return hidden.sum(axis=-1).astype(mx.float32)
        rows = chunk_rows(split.vocab_size)
        return scores(split, hidden, extras, score, rows=rows, ahead=model.training)

    def split(self, model: nn.Module) -> Split:
        """The model as body and head."""
        if self._split is None or self._split.model is not model:
            self._split = Split(model)
        return self._split

    def hidden(self, model: nn.Module, batch: Batch, supervised: Supervised) -> mx.array:
        """[n, hidden_size]: what the head is fed at the supervised positions."""
        split = self.split(model)
        # Without a gradient the whole at once is faster, and nothing of it is kept.
        scope = in_blocks() if model.training else contextlib.nullcontext()
        with scope, isolated(model, batch.segments):
            hidden = split.body(batch.inputs)
        return hidden.reshape(-1, hidden.shape[-1])[supervised.positions]


def log_prob(logits: mx.array, targets: mx.array) -> mx.array:
    """Log-probability of targets [n] under logits [n, vocab], in float32."""
    found: Any = _log_prob(logits, targets)
    return found[0]


@mx.custom_function
def _log_prob(logits: mx.array, targets: mx.array) -> list[mx.array]:
    """The log-probability, and all probabilities for the way back: exp is what costs most."""
    wide = logits.astype(mx.float32)
    highest = mx.stop_gradient(wide.max(axis=-1, keepdims=True))
    powers = mx.exp(wide - highest)
    total = powers.sum(axis=-1, keepdims=True)
    chosen = mx.take_along_axis(wide, targets[:, None], axis=-1)
    return [(chosen - highest - mx.log(total))[:, 0], powers / total]


@_log_prob.vjp
def _log_prob_back(primals: Any, cotangents: Any, outputs: Any) -> Any:
    # (one-hot - softmax) · cotangent in two arrays of the logits' size, where the derived form takes many.
    logits, targets = primals
    cotangent = cotangents[0]
    slope: Any = outputs[1] * -cotangent[:, None]
    slope = slope.at[mx.arange(targets.shape[0]), targets].add(cotangent)
    return slope.astype(logits.dtype), mx.zeros_like(targets)


def by_example(values: mx.array, supervised: Supervised) -> mx.array:
    """Sums of [n] over each example → [num_examples]."""
    zeros: Any = mx.zeros(supervised.num_examples, values.dtype)
    return zeros.at[mx.array(supervised.examples)].add(values)
