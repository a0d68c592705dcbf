"""Losses over answers that are preferred to others: DPO, ORPO, SimPO over pairs, KTO over judged answers.

A batch of pairs holds, in reading order (row by row, segment by segment), a chosen answer and then the rejected one of
the same pair. Whether two stand in one packed row or in rows of their own makes no difference. Every loss is a sum
over pairs (KTO: answers) and their count, in nats.

The reference of DPO and KTO is the same model inside a context, such as the one that switches adapters off: no second
copy of the weights. It is run without a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.losses.log_probs import Scorer, Supervised, by_example, log_prob
from mlxinfer.lora.modes import evaluating

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from mlxinfer.lora.types import Batch

    Reference = Callable[[nn.Module], AbstractContextManager[None]]


class _Answers:
    """Sums of log-probabilities over each answer."""

    def __init__(self) -> None:
        self._scorer = Scorer()

    def __call__(self, model: nn.Module, batch: Batch, supervised: Supervised) -> mx.array:
        """[num_examples] float32."""
        found = self._scorer(model, batch, supervised, log_prob, [supervised.targets])
        return by_example(found * supervised.weights, supervised)

    def of_reference(self, model: nn.Module, batch: Batch, supervised: Supervised, reference: Reference) -> mx.array:
        """The same under the reference, as constants; evaluated here, so that both runs aren't held at once."""
        with reference(model), evaluating(model):
            found = mx.stop_gradient(self(model, batch, supervised))
            mx.eval(found)
        return found


def _answers(batch: Batch) -> Supervised:
    """Raises InvalidRequestError for an answer of which nothing is supervised."""
    supervised = Supervised(batch)
    counts = np.bincount(supervised.examples, minlength=supervised.num_examples)
    if not counts.all():
        raise InvalidRequestError(
            f"answer {int(counts.argmin()) + 1} of {supervised.num_examples} in the batch has no supervised token: "
            "its log-probability says nothing; leave the row out"
        )
    return supervised


def _pairs(batch: Batch) -> Supervised:
    supervised = _answers(batch)
    if supervised.num_examples % 2:
        raise InvalidRequestError(f"a batch of pairs holds {supervised.num_examples} answers: one has no partner")
    return supervised


def _lengths(supervised: Supervised) -> mx.array:
    """Supervised tokens of each answer."""
    return mx.array(np.bincount(supervised.examples, minlength=supervised.num_examples).astype(np.float32))


def _sum_and_count(losses: mx.array) -> tuple[mx.array, mx.array]:
    return losses.sum(), mx.array(float(losses.size))


class DpoLoss:
    """-log sigmoid(beta · ((log π(c) - log π_ref(c)) - (log π(r) - log π_ref(r)))), Rafailov et al. 2023, eq. 7.

    `label_smoothing` is the part of pairs that are labelled the wrong way round (cDPO, Mitchell 2023).
    """

    def __init__(self, reference: Reference, *, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        _check(beta > 0, "beta", beta, "above 0")
        _check(0 <= label_smoothing < 0.5, "label_smoothing", label_smoothing, "at least 0 and below 0.5")
        self._reference, self._beta, self._smoothing = reference, beta, label_smoothing
        self._answers = _Answers()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, number of pairs). Raises InvalidRequestError."""
        supervised = _pairs(batch)
        before = self._answers.of_reference(model, batch, supervised, self._reference)
        ratios = self._answers(model, batch, supervised) - before
        margin = self._beta * (ratios[0::2] - ratios[1::2])
        right, wrong = nn.log_sigmoid(margin), nn.log_sigmoid(-margin)
        return _sum_and_count(-(1 - self._smoothing) * right - self._smoothing * wrong)


class OrpoLoss:
    """-log p(c) / |c| - weight · log sigmoid(log odds(c) - log odds(r)), Hong et al. 2024, eq. 6 and 7.

    The odds are of p = exp(log p(y) / |y|). No reference.
    """

    def __init__(self, *, weight: float = 0.1) -> None:
        _check(weight > 0, "weight", weight, "above 0")
        self._weight = weight
        self._answers = _Answers()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, number of pairs). Raises InvalidRequestError."""
        supervised = _pairs(batch)
        mean = self._answers(model, batch, supervised) / _lengths(supervised)
        odds = mean - _log_one_less(mean)
        ratio = nn.log_sigmoid(odds[0::2] - odds[1::2])
        return _sum_and_count(-mean[0::2] - self._weight * ratio)


class SimpoLoss:
    """-log sigmoid(beta · (log p(c) / |c| - log p(r) / |r|) - margin), Meng et al. 2024, eq. 6. No reference."""

    def __init__(self, *, beta: float = 2.0, margin: float = 1.0) -> None:
        _check(beta > 0, "beta", beta, "above 0")
        _check(margin >= 0, "margin", margin, "0 or more")
        self._beta, self._margin = beta, margin
        self._answers = _Answers()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, number of pairs). Raises InvalidRequestError."""
        supervised = _pairs(batch)
        mean = self._answers(model, batch, supervised) / _lengths(supervised)
        return _sum_and_count(-nn.log_sigmoid(self._beta * (mean[0::2] - mean[1::2]) - self._margin))


class KtoLoss:
    """w · (1 - sigmoid(beta · (r - z))) for wanted answers, u · (1 - sigmoid(beta · (z - r))) for others.

    Ethayarajh et al. 2024; w and u are `wanted_weight` and `unwanted_weight`.

    r = log π(y) - log π_ref(y). z is a constant: the mean of r over `batch.mismatched`, at least 0. It belongs to its
    micro-batch; ranks and micro-batches don't share it.
    """

    def __init__(
        self, reference: Reference, *, beta: float = 0.1, wanted_weight: float = 1.0, unwanted_weight: float = 1.0
    ) -> None:
        _check(beta > 0, "beta", beta, "above 0")
        _check(wanted_weight > 0, "wanted_weight", wanted_weight, "above 0")
        _check(unwanted_weight > 0, "unwanted_weight", unwanted_weight, "above 0")
        self._reference, self._beta = reference, beta
        self._weights = wanted_weight, unwanted_weight
        self._answers = _Answers()

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, number of answers). Raises InvalidRequestError."""
        supervised = _answers(batch)
        if batch.wanted is None or batch.mismatched is None:
            raise InvalidRequestError("a KTO batch needs `wanted` and `mismatched`")
        if batch.wanted.shape != (supervised.num_examples,):
            raise InvalidRequestError(f"{supervised.num_examples} answers, `wanted` is {batch.wanted.shape}")
        z = self._baseline(model, batch.mismatched)
        ratios = self._ratios(model, batch, supervised, self._answers(model, batch, supervised))
        wanted = batch.wanted.astype(mx.bool_)
        high, low = self._weights
        gain = self._beta * (ratios - z)
        return _sum_and_count(mx.where(wanted, high * mx.sigmoid(-gain), low * mx.sigmoid(gain)))

    def _baseline(self, model: nn.Module, batch: Batch) -> mx.array:
        supervised = _answers(batch)
        with evaluating(model):
            now = mx.stop_gradient(self._answers(model, batch, supervised))
            mx.eval(now)
        return mx.maximum(self._ratios(model, batch, supervised, now).mean(), 0.0)

    def _ratios(self, model: nn.Module, batch: Batch, supervised: Supervised, now: mx.array) -> mx.array:
        return now - self._answers.of_reference(model, batch, supervised, self._reference)


def _log_one_less(log_p: mx.array) -> mx.array:
    """log(1 - p) from log p < 0, without losing digits at either end."""
    # Where p is 1 to the last digit the odds are infinite; a float's worth less keeps the loss a number.
    log_p = mx.minimum(log_p, -1e-7)
    return mx.where(log_p > -0.6931472, mx.log(-mx.expm1(log_p)), mx.log1p(-mx.exp(log_p)))


def _check(right: bool, name: str, value: float, expected: str) -> None:
    if not right:
        raise InvalidRequestError(f"{name} is {value}; it must be {expected}", param=name)
