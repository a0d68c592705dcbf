"""Adapters on disk as mlx-lm reads and writes them: adapters.safetensors and adapter_config.json.

Under "mlxinfer" the config also has the digest of the weights that it belongs to, and what base they are for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import open_regular, read_json_object
from mlxinfer.lora import bases, methods
from mlxinfer.lora.checkpoint import load_weights, read_tensors, write_folder
from mlxinfer.lora.methods import MethodOptions
from mlxinfer.lora.targets import block_prefixes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.lora.methods import Method

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
OURS = "mlxinfer"
STAGED = ".staged"
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MAX_NAMED = 40
"""Tensors and layers that a message names."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in memory, laid out as mlx-lm does."""

    options: MethodOptions
    """`targets` are the whole paths of the adapted layers; none with "full"."""
    weights: Mapping[str, mx.array]
    """`<path>.lora_a`, `.lora_b` and, for DoRA, `.m`; with "full" parameters of the model."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else stands under "mlxinfer" in the config."""


def save_adapter(folder: Path, model: nn.Module, options: MethodOptions, extra: Mapping[str, Any]) -> None:
    """Write what is trained of `model`; `extra` are further keys of the config. Other files in `folder` stay.

    The layers stand in "keys" with their whole paths, which mlx-lm finds whatever `num_layers` says.
    Raises TrainingError where it cannot be written; the adapter that was there stays then.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    write_adapter(folder, Adapter(options, weights, extra.get(OURS) or {}), model, extra)


def write_adapter(folder: Path, adapter: Adapter, model: nn.Module, extra: Mapping[str, Any] | None = None) -> None:
    """Write `adapter`, which is for `model`, as save_adapter does."""
    options, weights = adapter.options, dict(adapter.weights)
    mx.eval(weights)
    keys = sorted({name.rpartition(".")[0] for name in weights}) if options.method != "full" else []
    config: dict[str, Any] = {
        **(extra or {}),
        "fine_tune_type": options.method if options.method in ("dora", "full") else "lora",
        "num_layers": options.num_layers or len(block_prefixes(model)),
    }
    ours: dict[str, Any] = {**adapter.notes, "method": options.method}
    if keys:
        config["lora_parameters"] = {
            "rank": options.rank, "scale": options.scale, "dropout": options.dropout, "keys": keys,
        }  # fmt: skip
        ours["alpha"] = options.alpha
    ours["base"] = bases.fingerprint(model, keys)

    def fill(new: Path) -> None:
        mx.save_safetensors(str(new / WEIGHTS), weights, metadata={"format": "mlx"})
        config[OURS] = ours | {"weights_sha256": _digest(new / WEIGHTS)}
        (new / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    folder.mkdir(parents=True, exist_ok=True)
    mend_adapter(folder)
    staged = folder / STAGED
    write_folder(staged, fill)
    # Killed between the two, the new weights have the old config, and `mend_adapter` brings them theirs.
    (staged / WEIGHTS).replace(folder / WEIGHTS)
    with contextlib.suppress(FileNotFoundError):  # a reader mended it already
        (staged / CONFIG).replace(folder / CONFIG)
        staged.rmdir()


def mend_adapter(folder: Path) -> None:
    """Bring weights that were being saved when the process was killed the config that belongs to them."""
    staged = folder / STAGED
    if not (staged / CONFIG).exists() or (staged / WEIGHTS).exists():
        return
    with contextlib.suppress(OSError, ModelFileError):  # the digest is checked again when the adapter is read
        if _recorded(read_json_object(staged / CONFIG) or {}) == _digest(folder / WEIGHTS):
            (staged / CONFIG).replace(folder / CONFIG)
        staged.rmdir()


def read_adapter(folder: Path, model: nn.Module) -> Adapter:
    """An adapter of ours or of mlx-lm's for `model`, which stays as it is.

    Raises ModelFileError that names every tensor and layer that doesn't go with the model, or the files that don't go
    with each other.
    """
    mend_adapter(folder)
    path = folder / CONFIG
    config = read_json_object(path)
    if config is None:
        raise ModelFileError(f"{path} is missing; is {folder} an adapter?")
    if "peft_type" in config:
        raise UnsupportedModelError(f"{path} is PEFT's; convert it first: mlxinfer lora import")
    digest = _recorded(config)
    if digest is not None and digest != _digest(folder / WEIGHTS):
        raise ModelFileError(
            f"{path} is the config of other weights than {WEIGHTS}: {OURS}.weights_sha256 differs. The folder was "
            "copied or saved in part; copy it anew, or delete that key if the weights were changed on purpose"
        )
    ours = _ours(config)
    wrong = bases.differences(ours["base"], model, f"{path}: {OURS}.base") if "base" in ours else []
    try:
        options = _options(config, model, path)
    except _NoLayerError as error:
        raise ModelFileError("; ".join([str(error), *wrong[:MAX_NAMED]])) from error
    weights = read_tensors(folder / WEIGHTS)
    if options.method == "full":
        wrong += misfits(weights, _parameters(model), whole=False)
    else:
        wrong += misfits(weights, expected(model, options))
    wrong = wrong or not_finite(weights)
    if wrong:
        named = "; ".join(wrong[:MAX_NAMED]) + (
            f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        )
        raise ModelFileError(f"{folder / WEIGHTS} is damaged, or for another model: {named}")
    notes = {key: value for key, value in ours.items() if key not in ("base", "weights_sha256", "method", "alpha")}
    return Adapter(options, weights, notes)


def load_adapter(model: nn.Module, folder: Path) -> MethodOptions:
    """Put an adapter of ours or of mlx-lm's on a model without one. Raises ModelFileError as read_adapter does."""
    adapter = read_adapter(folder, model)
    options = adapter.options
    methods.apply(model, options)
    if options.method == "full":
        # mlx-lm writes the trained part of a fully tuned model, which may be some layers only.
        model.freeze()
        held = dict(model.named_modules())
        for name in adapter.weights:
            path, _, leaf = name.rpartition(".")
            held[path].unfreeze(keys=leaf, recurse=False)
    load_weights(model, adapter.weights, str(folder / WEIGHTS))
    return options


def expected(model: nn.Module, options: MethodOptions) -> dict[str, tuple[int, ...]]:
    """The tensors of an adapter on the layers `options.targets`."""
    layers = bases.layers_of(model)
    shapes = {
        path: bases.adapter_shapes(layers[path], options.rank, dora=options.method == "dora")
        for path in options.targets
    }
    return {f"{path}.{leaf}": shape for path, found in shapes.items() for leaf, shape in found.items()}


def misfits(weights: Mapping[str, mx.array], wanted: Mapping[str, tuple[int, ...]], *, whole: bool = True) -> list[str]:
    """What is wrong with tensors, each in words."""
    wrong = [f"{name} is missing" for name in wanted if name not in weights] if whole else []
    for name, value in weights.items():
        if name not in wanted:
            wrong.append(f"{name:.160} is nothing that this model trains")
        elif value.shape != wanted[name]:
            wrong.append(f"{name} is {value.shape}; the model has {wanted[name]}")
        elif value.dtype not in FLOATS:
            wrong.append(f"{name} is {value.dtype}; floats are expected")
    return wrong


def not_finite(weights: Mapping[str, mx.array]) -> list[str]:
    """Tensors that hold what is no number, each in words: one of them makes all that a model says none."""
    fine = {name: mx.isfinite(value).all() for name, value in weights.items() if value.dtype in FLOATS}
    mx.eval(fine)
    return [f"{name} holds NaN or infinity" for name, held in fine.items() if not held.item()]


def _parameters(model: nn.Module) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(model.parameters())
    return {name: value.shape for name, value in flat}


def _digest(path: Path) -> str:
    """SHA-256 of a file. Raises ModelFileError where there is none."""
    file: Any = open_regular(path)
    if file is None:
        raise ModelFileError(f"{path} is missing")
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _ours(config: Mapping[str, Any]) -> dict[str, Any]:
    found = config.get(OURS)
    return found if isinstance(found, dict) else {}


def _recorded(config: Mapping[str, Any]) -> object:
    """The digest of the weights that a config belongs to; mlx-lm's has none."""
    return _ours(config).get("weights_sha256")


class _NoLayerError(ModelFileError):
    """The config names no layer of the model."""


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
    for name, value, limit in (("scale", scale, methods.MAX_SCALE), ("dropout", dropout, 1.0)):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < limit:
            raise ModelFileError(f"{source}: lora_parameters.{name} is {value!r:.80}; a number from 0 is expected")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise ModelFileError(f"{source}: num_layers is {layers!r:.80}; a whole number is expected")
    targets = _targets(given.get("keys"), layers, model, source)
    ours = _ours(config)
    return _scaled(method, rank, float(scale or 0), float(dropout), targets, ours.get("method"), ours.get("alpha"))


def _scaled(
    method: Method, rank: int, scale: float, dropout: float, targets: tuple[str, ...], trained_by: object, alpha: object
) -> MethodOptions:
    """With the alpha that it was trained with, if that still is what makes the scale."""
    if isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < methods.MAX_SCALE:
        named: Method = "rslora" if trained_by == "rslora" and method == "lora" else method
        recorded = MethodOptions(named, rank, float(alpha), dropout, targets)
        if recorded.scale == scale:
            return recorded
    return MethodOptions(method, rank, scale * rank, dropout, targets)


def _targets(keys: Any, layers: int, model: nn.Module, source: Path) -> tuple[str, ...]:
    """mlx-lm's keys, inside a block or in the whole model, as whole paths."""
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise ModelFileError(f"{source}: lora_parameters.keys is {keys!r:.80}; a list of names is expected")
    # As mlx-lm counts: 0 and fewer are all blocks.
    blocks = block_prefixes(model)[-max(layers, 0) :]
    wanted = None if keys is None else frozenset(keys)
    found: list[str] = []
    for path in bases.layers_of(model):
        block = next((block for block in blocks if path.startswith(f"{block}.")), None)
        inner = path[len(block) + 1 :] if block else None
        if (wanted is None and block) or (wanted is not None and (path in wanted or inner in wanted)):
            found.append(path)
    if not found:
        raise _NoLayerError(f"{source}: no layer of this model is named in lora_parameters.keys")
    return tuple(found)
