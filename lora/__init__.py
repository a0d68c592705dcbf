"""`mlxinfer lora`: fine-tuning with low-rank adapters."""

from mlxinfer.lora.adapter import load_adapter, save_adapter
from mlxinfer.lora.callbacks import Callback
from mlxinfer.lora.config import TrainConfig
from mlxinfer.lora.evaluate import Evaluation, evaluate
from mlxinfer.lora.history import History
from mlxinfer.lora.job import fine_tune
from mlxinfer.lora.methods import MethodOptions, adapter_off, apply
from mlxinfer.lora.trainer import train

__all__ = [
    "Callback",
    "Evaluation",
    "History",
    "MethodOptions",
    "TrainConfig",
    "adapter_off",
    "apply",
    "evaluate",
    "fine_tune",
    "load_adapter",
    "save_adapter",
    "train",
]
