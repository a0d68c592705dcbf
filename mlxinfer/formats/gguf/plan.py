"""What the header of a GGUF file comes to: an mlx-lm config, parameters that can be read, a tokenizer. No mlx here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.formats.gguf.architectures import architecture_of, model_config
from mlxinfer.formats.gguf.mapping import parameters_of
from mlxinfer.formats.gguf.reader import GGUFFile, read_gguf
from mlxinfer.formats.gguf.vocab import read_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.formats.gguf.architectures import Architecture
    from mlxinfer.formats.gguf.parameters import Parameter
    from mlxinfer.formats.gguf.vocab import Vocabulary


@dataclass(frozen=True, slots=True)
class GGUFPlan:
    """What a file's header says; no array has been made."""

    file: GGUFFile
    architecture: Architecture
    config: dict[str, Any]
    """As in GGUFModel, without "quantization"."""
    parameters: tuple[Parameter, ...]
    dropped: dict[str, str]
    """Tensors that nothing is made of, and why."""
    vocabulary: Vocabulary


def plan_gguf(path: Path) -> GGUFPlan:
    """Read and check the header of `path`. On any thread. Raises ModelFileError or UnsupportedModelError."""
    file = read_gguf(path)
    architecture = architecture_of(file)
    config = model_config(file)
    parameters, dropped = parameters_of(file, architecture, config)
    vocabulary = read_vocabulary(file, config["vocab_size"])
    config["bos_token_id"] = vocabulary.bos_token_id
    config["eos_token_id"] = list(vocabulary.eos_token_ids)
    return GGUFPlan(file, architecture, config, tuple(parameters), dropped, vocabulary)
