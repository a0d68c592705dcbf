"""mlx's optimizers with the defaults that others have, and gradients scaled to a global norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.optimizers as optim

if TYPE_CHECKING:
    from mlxinfer.lora.config import TrainConfig


def build_optimizer(config: TrainConfig) -> optim.Optimizer:
    """The optimizer of a config; the trainer sets its rate before each update."""
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "adamw":
        # Off by default in mlx, and then the first updates are up to a third of what was asked for.
        betas = [config.beta1, config.beta2]
        return optim.AdamW(rate, betas=betas, eps=config.eps, weight_decay=decay, bias_correction=True)
    if config.optimizer == "adafactor":
        return optim.Adafactor(rate, weight_decay=decay, relative_step=False, scale_parameter=False)
    if config.optimizer == "muon":
        return optim.Muon(rate, momentum=config.momentum, weight_decay=decay)
    return optim.SGD(rate, momentum=config.momentum, weight_decay=decay)


def global_norm(gradients: dict[str, mx.array]) -> mx.array:
    """The 2-norm over all gradients together, a float32 scalar."""
    return mx.sqrt(sum((g.astype(mx.float32).square().sum() for g in gradients.values()), mx.array(0.0)))


def clip(gradients: dict[str, mx.array], norm: float, limit: float) -> dict[str, mx.array]:
    """Scaled down together so that their global norm is `limit` at most."""
    factor = min(limit / (norm + 1e-6), 1.0)
    return {name: (g * factor).astype(g.dtype) for name, g in gradients.items()}
