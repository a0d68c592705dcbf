"""What sentence-transformers' files beside a model say: pooling, what follows it, lengths and prompts.

modules.json lists the parts in order; the first is the model itself, the second pools. 1_Pooling/config.json,
2_Dense/config.json and so on say how. Without modules.json: the mean of the tokens, as sentence-transformers has it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.encoders.checks import Values
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PoolMode = Literal["cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken"]
MODES: dict[PoolMode, str] = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
"""And their keys in configs, in the order in which several of them are put side by side."""
MAX_MODULES = 8
MAX_PROMPTS = 64
MAX_PROMPT_CHARS = 4096
MAX_FILE_BYTES = 1 << 20
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")
_FOLDER = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer behind the pooling."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str


Step = DenseSpec | Literal["normalize"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How hidden states become an embedding."""

    pooling: tuple[PoolMode, ...] = ("mean",)
    steps: tuple[Step, ...] = ()
    max_tokens: int | None = None
    """Tokens of a text that the model was trained for, special ones counted; None: what its positions allow."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name → the text that goes before the text."""
    default_prompt: str | None = None

    @property
    def normalized(self) -> bool:
        return bool(self.steps) and self.steps[-1] == "normalize"

    def dimensions(self, hidden_size: int) -> int:
        """Of the embedding. Raises ModelFileError when a dense layer doesn't fit what comes before it."""
        size = hidden_size * len(self.pooling)
        for step in self.steps:
            if step == "normalize":
                continue
            if step.in_features != size:
                raise ModelFileError(f"{step.folder}: in_features is {step.in_features}, but {size} come in")
            size = step.out_features
        return size


def read_recipe(folder: Path) -> Recipe:
    """Read what lies in `folder`. Raises ModelFileError, or UnsupportedModelError for a part that isn't known here."""
    prompts, default = _prompts(folder)
    bert = read_json_object(folder / "sentence_bert_config.json", MAX_FILE_BYTES) or {}
    longest = None
    if bert.get("max_seq_length") is not None:
        longest = Values(str(folder / "sentence_bert_config.json"), bert).size("max_seq_length")
    modules = _module_list(folder)
    if modules is None:
        return Recipe(max_tokens=longest, prompts=prompts, default_prompt=default)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise UnsupportedModelError(
            f"{folder}/modules.json begins with {', '.join(kinds[:2])}; it must be Transformer, Pooling"
        )
    steps: list[Step] = []
    for kind, path in modules[2:]:
        if kind == "Normalize":
            steps.append("normalize")
        elif kind == "Dense":
            steps.append(_dense(folder, path))
        else:
            raise UnsupportedModelError(f"{folder}/modules.json has a part {kind!r:.80}; Dense and Normalize are known")
    return Recipe(_pooling(folder / modules[1][1] / "config.json"), tuple(steps), longest, prompts, default)


def _module_list(folder: Path) -> list[tuple[str, str]] | None:
    """(kind, folder) of each part, in order."""
    path = folder / "modules.json"
    data = read_regular(path, MAX_FILE_BYTES)
    if data is None:
        return None
    try:
        parts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(parts, list) or not 2 <= len(parts) <= MAX_MODULES:
        raise ModelFileError(f"{path} must hold a list of 2 to {MAX_MODULES} parts")
    found: list[tuple[str, str]] = []
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise ModelFileError(f"{path}: part {number} must be an object with a type")
        name = part.get("path", "")
        if not isinstance(name, str) or ".." in name or not (_FOLDER.fullmatch(name) or (number == 0 and not name)):
            raise ModelFileError(
                f"{path}: the path of part {number} is {name!r:.80}; a folder's plain name is expected"
            )
        found.append((part["type"].rpartition(".")[2], name))
    return found


def _pooling(path: Path) -> tuple[PoolMode, ...]:
    config = read_json_object(path, MAX_FILE_BYTES)
    if config is None:
        raise ModelFileError(f"{path} is missing")
    values = Values(str(path), config)
    if not values.flag("include_prompt", True):
        raise UnsupportedModelError(f"{path}: include_prompt is false; pooling without the prompt isn't supported")
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        wanted = named if isinstance(named, list) else [named]
        modes: tuple[PoolMode, ...] = tuple(mode for mode in MODES if mode in wanted)
        if not modes or len(modes) != len(wanted):
            raise values.error("pooling_mode", named, f"one of {', '.join(MODES)}")
        return modes
    chosen: tuple[PoolMode, ...] = tuple(mode for mode, key in MODES.items() if values.flag(key, False))
    if not chosen:
        raise ModelFileError(f"{path} chooses no way of pooling, such as pooling_mode_mean_tokens")
    return chosen


def _dense(folder: Path, name: str) -> DenseSpec:
    path = folder / name / "config.json"
    config = read_json_object(path, MAX_FILE_BYTES)
    if config is None:
        raise ModelFileError(f"{path} is missing")
    values = Values(str(path), config)
    activation = values.word("activation_function", default="Tanh").rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: activation_function is {activation!r}; known are {', '.join(ACTIVATIONS)}"
        )
    return DenseSpec(
        folder=name,
        in_features=values.size("in_features"),
        out_features=values.size("out_features"),
        bias=values.flag("bias", True),
        activation=activation,
    )


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    path = folder / "config_sentence_transformers.json"
    config = read_json_object(path, MAX_FILE_BYTES) or {}
    prompts: Any = config.get("prompts") or {}
    default = config.get("default_prompt_name")
    sound = isinstance(prompts, dict) and all(
        isinstance(text, str) and len(text) <= MAX_PROMPT_CHARS for text in prompts.values()
    )
    if not sound or len(prompts) > MAX_PROMPTS:
        raise ModelFileError(
            f"{path}: prompts must map up to {MAX_PROMPTS} names to texts of at most {MAX_PROMPT_CHARS} characters"
        )
    if default is not None and default not in prompts:
        raise ModelFileError(f"{path}: default_prompt_name is {default!r:.80}, which is none of its prompts")
    return prompts, default
