"""An adapter cut for the ranks of a plan: to each the layers that it holds, and of those its rows and columns.

A part is an adapter's folder like any other, so a rank reads and checks it as one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer import upstream
from mlxinfer.distributed.groups import PretendGroup
from mlxinfer.distributed.ways import split_model
from mlxinfer.engine.adapter_files import CONFIG, WEIGHTS, digest_of, read_adapter
from mlxinfer.engine.blank import blank
from mlxinfer.errors import ConversionError, MlxinferError, ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import json_bytes, replace_file, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import mlx.nn as nn

    from mlxinfer.distributed.shards import Part
    from mlxinfer.engine.adapter_files import AdapterFiles


def cut_adapter(config: Mapping[str, Any], files: AdapterFiles, part: Part, target: Path) -> Path | None:
    """Write what the rank of `part` needs of an adapter below `target`, and return the folder; None where that is
    nothing: a stage whose layers have none. `config` is the model's.

    The adapter must be one that goes with the whole model. Raises UnsupportedModelError where it can't be cut like
    that, ModelFileError where its file has changed, ConversionError where the disk says no.
    """
    name = hashlib.sha256(files.digest.encode() + json_bytes(config)).hexdigest()[:16]
    folder = target / f"adapter-{name}-{part.name}"
    with contextlib.suppress(MlxinferError):
        read_adapter("whole", folder)
        return folder
    refuse_uncut(config, files, part)
    says = json.dumps([files.num_layers, files.rank, files.scale, files.keys, files.dora])
    if digest_of(files.weights, says) != files.digest:
        raise ModelFileError(f"{files.weights} has changed since it was registered; load the model again")
    arrays: Any = mx.load(str(files.weights))
    held = dict(_held(config, arrays, part))
    if not held:
        return None
    work = target / f".{folder.name}.new"
    parameters = {"rank": files.rank, "scale": files.scale, "keys": None}
    about: dict[str, Any] = {
        "fine_tune_type": "dora" if files.dora else "lora",
        "num_layers": -1,
        "lora_parameters": parameters,
    }
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        mx.save_safetensors(str(work / WEIGHTS), held, metadata={"format": "mlx"})
        with (work / WEIGHTS).open("rb+") as file:
            os.fsync(file.fileno())
        about["mlxinfer"] = {"weights_sha256": sha256_of(work / WEIGHTS)}
        replace_file(work / CONFIG, json_bytes(about))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise ConversionError(f"{folder} cannot be written: {error}") from error
    return folder


def refuse_uncut(config: Mapping[str, Any], files: AdapterFiles, part: Part) -> None:
    """Raise UnsupportedModelError for an adapter that can't be shared by heads."""
    if part.kind == "pipeline" or part.size == 1:
        return
    if files.dora:
        raise UnsupportedModelError(
            f"the adapter {files.name} is a DoRA one: the length of a row of weights can't be told from a part of it. "
            "A split by layers (--kind pipeline) takes it"
        )
    model = blank(config, keep_packed=False)
    layers = upstream.lora_layers(
        model, num_layers=files.num_layers, rank=files.rank, scale=files.scale,
        keys=None if files.keys is None else list(files.keys), dora=False,
    )  # fmt: skip
    others = {type(layer).__name__ for layer in layers.values()} - {"LoRALinear", "LoRASwitchLinear", "LoRAEmbedding"}
    if others:
        named = ", ".join(sorted(others))
        raise UnsupportedModelError(f"the adapter {files.name} has layers that can't be shared by heads: {named}")


def _held(config: Mapping[str, Any], arrays: Mapping[str, mx.array], part: Part) -> Iterator[tuple[str, mx.array]]:
    """What this rank has of each tensor whose layer it holds."""
    paths = {name.rpartition(".")[0] for name in arrays}
    whole = blank(config, keep_packed=False)
    sizes = _shapes(whole, paths)
    split_model(whole, part.kind, part.split, PretendGroup(part.rank, part.size))
    cut = _shapes(whole, paths)
    shared = {path for path, shape in cut.items() if shape != sizes[path]}
    # Again, with weights that say where they come from: one column or one row of them, by the axis that is shared out.
    model = blank(config, keep_packed=False)
    for path, _, _, module in upstream.child_slots(model):
        if path in shared:
            rows, columns = sizes[path]
            numbers = mx.arange(rows)[:, None] if cut[path][0] != rows else mx.arange(columns)[None]
            # Of a stack of experts one is enough.
            module["weight"] = numbers if module["weight"].ndim == 2 else numbers[None]
    split_model(model, part.kind, part.split, PretendGroup(part.rank, part.size))
    mx.eval(mx.random.state)
    numbers = {
        path: module["weight"].reshape(-1) for path, _, _, module in upstream.child_slots(model) if path in shared
    }
    for name in sorted(arrays):
        path, _, leaf = name.rpartition(".")
        if path in shared and (leaf == "lora_b") == (cut[path][0] != sizes[path][0]):
            yield name, _of_rank(leaf, arrays[name], numbers[path])
        elif path in cut:
            yield name, arrays[name]


def _shapes(model: nn.Module, paths: set[str]) -> dict[str, tuple[int, int]]:
    """[out, in] of each of these layers, or of its experts."""
    held: Any = {path: module for path, _, _, module in upstream.child_slots(model) if path in paths}
    return {path: module["weight"].shape[-2:] for path, module in held.items()}


def _of_rank(leaf: str, array: mx.array, numbers: mx.array) -> mx.array:
    """lora_a [in, r] takes what comes in, lora_b [r, out] gives what goes out; of experts [E, r, in], [E, out, r]."""
    first, stacked = leaf == "lora_a", array.ndim == 3
    axis = (-1 if first else -2) if stacked else (0 if first else -1)
    return mx.take(array, numbers, axis=axis)
