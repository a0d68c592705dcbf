"""Losses: what a batch and a model give as a sum and a count."""

from mlxinfer.lora.losses.distill import DistillLoss
from mlxinfer.lora.losses.examples import mismatched
from mlxinfer.lora.losses.preference import DpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from mlxinfer.lora.losses.sft import SupervisedLoss

__all__ = [
    "DistillLoss",
    "DpoLoss",
    "KtoLoss",
    "OrpoLoss",
    "SimpoLoss",
    "SupervisedLoss",
    "mismatched",
]
