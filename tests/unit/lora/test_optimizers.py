"""Optimizers take the options that were given, by hand-computed updates; gradients are scaled to a norm together."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest

from mlxinfer.lora import TrainConfig
from mlxinfer.lora.optimizers import build_optimizer, clip, global_norm

GRADIENTS = (1.0, 3.0, -2.0)


def updated(**options: Any) -> float:
    """A weight of 2 after three updates."""
    optimizer = build_optimizer(TrainConfig(learning_rate=0.1, **options))
    held = {"w": mx.array([[2.0]])}
    for gradient in GRADIENTS:
        held = optimizer.apply_gradients({"w": mx.array([[gradient]])}, held)
    return held["w"].item()  # type: ignore[return-value]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.1)])
def test_sgd_has_its_momentum_and_weight_decay(momentum: float, decay: float) -> None:
    weight, speed = 2.0, 0.0
    for gradient in GRADIENTS:
        speed = momentum * speed + gradient + decay * weight
        weight -= 0.1 * speed
    assert updated(optimizer="sgd", momentum=momentum, weight_decay=decay) == pytest.approx(weight, rel=1e-5)


def test_adamw_has_its_betas_its_epsilon_its_decay_and_bias_correction() -> None:
    weight, mean, square = 2.0, 0.0, 0.0
    for number, gradient in enumerate(GRADIENTS, 1):
        mean = 0.6 * mean + 0.4 * gradient
        square = 0.8 * square + 0.2 * gradient**2
        step = (mean / (1 - 0.6**number)) / (math.sqrt(square / (1 - 0.8**number)) + 0.01)
        weight = weight * (1 - 0.1 * 0.3) - 0.1 * step
    found = updated(optimizer="adamw", beta1=0.6, beta2=0.8, eps=0.01, weight_decay=0.3)
    assert found == pytest.approx(weight, rel=1e-4)


def test_adafactor_steps_by_the_rate_that_was_given() -> None:
    optimizer = build_optimizer(TrainConfig(optimizer="adafactor", learning_rate=0.01))
    for size in (1.0, 1000.0):
        held = optimizer.apply_gradients({"w": mx.ones((4, 4))}, {"w": mx.full((4, 4), size)})
        assert mx.abs(size - held["w"]).max().item() == pytest.approx(0.01, rel=0.05)
        optimizer = build_optimizer(TrainConfig(optimizer="adafactor", learning_rate=0.01))


def test_gradients_are_scaled_down_together_and_never_up() -> None:
    gradients = {"a": mx.array([3.0]), "b": mx.array([[4.0]])}
    norm = float(global_norm(gradients).item())  # type: ignore[arg-type]
    assert norm == pytest.approx(5.0)
    assert [value.item() for value in clip(gradients, norm, 1.0).values()] == pytest.approx([0.6, 0.8], rel=1e-5)
    assert [value.item() for value in clip(gradients, norm, 9.0).values()] == [3.0, 4.0]
