"""Training data: rows of files or of the hub, as tokens of which is known what is learnt."""

from mlxinfer.lora.data.build import read_examples
from mlxinfer.lora.data.options import DataOptions, Dataset, Dropped

__all__ = ["DataOptions", "Dataset", "Dropped", "read_examples"]
