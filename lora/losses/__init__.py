"""Losses: what a batch and a model give as a sum and a count."""

from mlxinfer.lora.losses.distill import DistillLoss
from mlxinfer.lora.losses.examples import answers_of_pairs, mismatched
from mlxinfer.lora.losses.preference import DpoLoss, KtoLoss, OrpoLoss, SimpoLoss
from mlxinfer.lora.losses.sft import SupervisedLoss

__all__ = [
    "DistillLoss",
    "DpoLoss",
    "KtoLoss",
    "OrpoLoss",
    "SimpoLoss",
    "SupervisedLoss",
    "answers_of_pairs",
    "mismatched",
]
