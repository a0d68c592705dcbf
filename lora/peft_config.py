"""PEFT's adapter_config.json: what of it is honoured, and what is refused because nothing here would honour it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object
from mlxinfer.lora.methods import MAX_SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16
IGNORED = frozenset(
    [
        "alpha_pattern",
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
        "ensure_weight_tying",
    ]
)
"""Fields that are read here, that say how the adapter was begun, or what its tensors say themselves."""
BEGUN_FROM_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin that change the base's own weights."""
_PLAIN_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What PEFT computes with."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    dropout: float
    alphas: Mapping[str, float]
    """alpha_pattern: the end of a path, or with ^ a whole one, to the alpha there."""
    one_rank: bool = False
    """There is no rank_pattern: `rank` is every layer's."""

    def alpha_of(self, path: str) -> float:
        """As PEFT finds it: the first pattern that fits."""
        for pattern, alpha in self.alphas.items():
            plain = pattern.replace("\\.", ".").removesuffix("$")
            whole = plain.startswith("^")
            if path == plain.removeprefix("^") or (not whole and path.endswith(f".{plain}")):
                return alpha
        return self.alpha

    def scale_of(self, path: str, rank: int) -> float:
        """What the product of B and A is multiplied by at `path`, where the rank is `rank`."""
        return self.alpha_of(path) / (math.sqrt(rank) if self.rslora else rank)


def read_config(folder: Path) -> PeftConfig:
    """Raises ModelFileError for a value that can't be, UnsupportedModelError for what isn't honoured here."""
    path = folder / CONFIG
    config = read_json_object(path, MAX_CONFIG_BYTES)
    if config is None:
        raise ModelFileError(f"{path} is missing; the folder of a PEFT adapter is expected")
    if "peft_type" not in config:
        raise ModelFileError(f"{path} has no peft_type; is {folder} an adapter of PEFT's?")
    if config["peft_type"] != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type is {config['peft_type']!r:.40}; only LORA is converted")
    _check_the_rest(path, config)
    rank = config.get("r", 8)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelFileError(f"{path}: r is {rank!r:.40}; a whole number from 1 to {MAX_RANK} is expected")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ModelFileError(f"{path}: alpha_pattern is {patterns!r:.80}; an object is expected")
    for pattern in patterns:
        if not _PLAIN_PATTERN.fullmatch(pattern):
            # An expression out of a file may take for ever to match.
            raise UnsupportedModelError(f"{path}: alpha_pattern {pattern!r:.80} is more than the end of a layer's path")
    return PeftConfig(
        rank,
        _number(path, "lora_alpha", config.get("lora_alpha", 8)),
        _flag(path, "use_rslora", config.get("use_rslora")),
        _flag(path, "use_dora", config.get("use_dora")),
        _number(path, "lora_dropout", config.get("lora_dropout", 0.0), 1.0),
        {pattern: _number(path, f"alpha_pattern.{pattern:.80}", alpha) for pattern, alpha in patterns.items()},
        one_rank=not config.get("rank_pattern"),
    )


def _number(path: Path, name: str, value: object, limit: float = MAX_SCALE) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
        raise ModelFileError(f"{path}: {name} is {value!r:.40}; a number from 0 and below {limit:g} is expected")
    return float(value)


def _flag(path: Path, name: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ModelFileError(f"{path}: {name} is {value!r:.40}; true or false is expected")
    return value is True


def _check_the_rest(path: Path, config: Mapping[str, Any]) -> None:
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModelError(f"{path}: bias is {bias!r:.40}; mlx-lm's adapters have no biases")
    begun = config.get("init_lora_weights")
    if begun is not None and not isinstance(begun, bool | str):
        raise ModelFileError(f"{path}: init_lora_weights is {begun!r:.40}; a name, true or false is expected")
    if isinstance(begun, str) and begun.lower().startswith(BEGUN_FROM_THE_BASE):
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {begun!r:.40}, which changes the base's own weights; save the adapter for "
            "the plain base (PEFT: path_initial_model_for_weight_conversion)"
        )
    hints = {
        "modules_to_save": "whole layers beside the adapter; merge them into the base with PEFT",
        "target_parameters": "adapters of bare parameters, for which mlx-lm has no layer",
    }
    for name, value in config.items():
        if name not in IGNORED and value:
            raise UnsupportedModelError(f"{path}: {name:.80} is {value!r:.80}; {hints.get(name, 'nothing honours it')}")


def config_text(
    base: str,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str],
    *,
    rslora: bool = False,
    dora: bool = False,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
) -> str:
    """adapter_config.json for PEFT. `ranks` and `alphas` are those of whole paths that have their own."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _short(alpha),
        "lora_dropout": dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": rslora,
        "use_dora": dora,
        "rank_pattern": {_whole(path): value for path, value in (ranks or {}).items()},
        "alpha_pattern": {_whole(path): _short(value) for path, value in (alphas or {}).items()},
    }
    return json.dumps(config, indent=2)


def _whole(path: str) -> str:
    """PEFT reads these as expressions."""
    return "^" + path.replace(".", "\\.")


def _short(value: float) -> float:
    """PEFT's alpha is a whole number wherever it can be."""
    return int(value) if value.is_integer() else value
