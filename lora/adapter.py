"""Adapters on disk as mlx-lm reads and writes them: adapters.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import read_json_object
from mlxinfer.lora import methods
from mlxinfer.lora.checkpoint import load_weights, read_tensors, write_folder, write_text
from mlxinfer.lora.methods import MethodOptions
from mlxinfer.lora.targets import block_prefixes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import mlx.nn as nn

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"


def save_adapter(folder: Path, model: nn.Module, options: MethodOptions, extra: Mapping[str, Any]) -> None:
    """Write what is trained of `model`; `extra` are further keys of the config. Other files in `folder` stay.

    The layers stand in "keys" with their whole paths, which mlx-lm finds whatever `num_layers` says.
    Raises TrainingError where it cannot be written; the adapter that was there stays then.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    mx.eval(weights)
    keys = sorted(path for path, module in model.named_modules() if "lora_a" in module)
    config: dict[str, Any] = {
        **extra,
        "fine_tune_type": options.method if options.method in ("dora", "full") else "lora",
        "num_layers": options.num_layers or len(block_prefixes(model)),
    }
    if keys:
        config["lora_parameters"] = {
            "rank": options.rank, "scale": options.scale, "dropout": options.dropout, "keys": keys,
        }  # fmt: skip

    def fill(new: Path) -> None:
        mx.save_safetensors(str(new / WEIGHTS), weights, metadata={"format": "mlx"})
        (new / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    # Both files are flushed and checked in a folder of their own before either takes its name.
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / ".staged"
    write_folder(staged, fill)
    (staged / WEIGHTS).replace(folder / WEIGHTS)
    write_text(folder / CONFIG, (staged / CONFIG).read_text(encoding="utf-8"))
    (staged / CONFIG).unlink()
    staged.rmdir()


def load_adapter(model: nn.Module, folder: Path) -> MethodOptions:
    """Put an adapter of ours or of mlx-lm's on a model without one. Raises ModelFileError that names every tensor."""
    config = read_json_object(folder / CONFIG)
    if config is None:
        raise ModelFileError(f"{folder / CONFIG} is missing; is {folder} an adapter?")
    options = _options(config, model, folder / CONFIG)
    weights = read_tensors(folder / WEIGHTS)
    methods.apply(model, options)
    if options.method == "full":
        # mlx-lm writes the trained part of a fully tuned model, which may be some layers only.
        model.freeze()
        for name in weights:
            path, _, leaf = name.rpartition(".")
            if path in (held := dict(model.named_modules())):
                held[path].unfreeze(keys=leaf, recurse=False)
    load_weights(model, weights, str(folder / WEIGHTS))
    return options


def _options(config: Mapping[str, Any], model: nn.Module, source: Path) -> MethodOptions:
    method, layers = config.get("fine_tune_type", "lora"), config.get("num_layers", -1)
    if method == "full":
        return MethodOptions("full")
    if method not in ("lora", "dora"):
        raise ModelFileError(f"{source}: fine_tune_type is {method!r:.80}; it is lora, dora or full")
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        raise ModelFileError(f"{source}: lora_parameters is missing")
    rank, scale, dropout = given.get("rank"), given.get("scale"), given.get("dropout", 0.0)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= 65_536:
        raise ModelFileError(f"{source}: lora_parameters.rank is {rank!r:.80}; a whole number from 1 is expected")
    for name, value, limit in (("scale", scale, math.inf), ("dropout", dropout, 1.0)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < limit:
            raise ModelFileError(f"{source}: lora_parameters.{name} is {value!r:.80}; a number from 0 is expected")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ModelFileError(f"{source}: num_layers is {layers!r:.80}; a whole number is expected")
    targets = _targets(given.get("keys"), layers, model, source)
    return MethodOptions(method, rank, float(scale or 0) * rank, float(dropout), targets)


def _targets(keys: Any, layers: int, model: nn.Module, source: Path) -> tuple[str, ...]:
    """mlx-lm's keys, inside a block or in the whole model, as whole paths."""
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ModelFileError(f"{source}: lora_parameters.keys is {keys!r:.80}; a list of names is expected")
    # As mlx-lm counts: 0 and fewer are all blocks.
    blocks = block_prefixes(model)[-max(layers, 0) :]
    paths = [path for path, module in model.named_modules() if methods.adaptable(module)]
    found: list[str] = []
    for path in paths:
        block = next((block for block in blocks if path.startswith(f"{block}.")), None)
        inner = path[len(block) + 1 :] if block else None
        if (keys is None and block) or (keys is not None and (path in keys or inner in keys)):
            found.append(path)
    if not found:
        raise ModelFileError(f"{source}: no layer of this model is named in lora_parameters.keys")
    return tuple(found)
