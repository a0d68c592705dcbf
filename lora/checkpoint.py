"""Checkpoints that are whole or not there: a folder is filled beside, flushed to disk, and renamed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlxinfer.errors import MlxinferError, ModelFileError, TrainingError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.safetensors import check_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import mlx.nn as nn
    import mlx.optimizers as optim

FOLDER = "checkpoints"
"""In the folder of a run."""
PREFIX = "update-"
BEST = "best"


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """`fill` writes the files of `folder`, which appears whole. Raises TrainingError; what was there stays then."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".new-{folder.name}")
    old = folder.with_name(f".old-{folder.name}")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        fill(new)
        for path in new.iterdir():
            if path.suffix == ".safetensors":
                check_safetensors(path)  # mlx may write a torn file to a full disk and say nothing
            _flush(path)
        _flush(new)
        if folder.exists():
            # Two renames: between them the folder is at `old`, where `mend` finds it.
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError, ModelFileError) as error:
        shutil.rmtree(new, ignore_errors=True)
        mend(folder)
        raise TrainingError(f"{folder}: cannot be written: {error}. What was saved before is kept") from error


def mend(folder: Path) -> None:
    """Put back what a process that was killed between two renames had moved aside."""
    old = folder.with_name(f".old-{folder.name}")
    if old.is_dir() and not folder.exists():
        with contextlib.suppress(OSError):
            old.rename(folder)


def mend_all(folder: Path) -> None:
    """`mend` for every checkpoint in `folder`."""
    for old in folder.glob(".old-*"):
        mend(old.with_name(old.name.removeprefix(".old-")))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, state: Mapping[str, Any], *, keep: int, best: bool
) -> Path:
    """Write `folder`/update-N (and `folder`/best) and delete all but the last `keep`.

    `state` is JSON and has "update". Raises TrainingError, with the earlier checkpoints kept.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    moments: dict[str, mx.array] = dict(tree_flatten(optimizer.state))
    mx.eval(weights, moments)

    def fill(new: Path) -> None:
        mx.save_safetensors(str(new / "weights.safetensors"), weights)
        mx.save_safetensors(str(new / "optimizer.safetensors"), moments)
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")

    path = folder / f"{PREFIX}{state['update']:08d}"
    # First: killed between the two, the run goes on from before and comes to the same best one again.
    if best:
        write_folder(folder / BEST, fill)
    write_folder(path, fill)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The whole ones, oldest first."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name[len(PREFIX) :].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def load(path: Path, model: nn.Module, optimizer: optim.Optimizer, fingerprint: str) -> dict[str, Any]:
    """Put a checkpoint back and return its state. Raises ModelFileError for another run's, or a damaged one."""
    state = read_json_object(path / "state.json")
    if state is None:
        raise ModelFileError(f"{path / 'state.json'} is missing; delete the folder to resume from an earlier one")
    if state.get("fingerprint") != fingerprint:
        raise ModelFileError(
            f"{path} is of a run with other options, rows or base; use another folder, or don't resume"
        )
    weights = read_tensors(path / "weights.safetensors")
    moments = read_tensors(path / "optimizer.safetensors")
    _check_moments(moments, model, optimizer, str(path / "optimizer.safetensors"))
    load_weights(model, weights, str(path / "weights.safetensors"))
    optimizer.state = tree_unflatten(list(moments.items()))
    mx.eval(model.trainable_parameters(), optimizer.state)
    return state


def _check_moments(moments: Mapping[str, mx.array], model: nn.Module, optimizer: optim.Optimizer, source: str) -> None:
    """Raises ModelFileError where they aren't the arrays that the optimizer keeps for what is trained."""
    optimizer.init(model.trainable_parameters())
    wanted: dict[str, mx.array] = dict(tree_flatten(optimizer.state))
    wrong = list(wanted.keys() ^ moments.keys())
    wrong += [
        name
        for name, own in wanted.items()
        if name in moments and (own.shape, own.dtype) != (moments[name].shape, moments[name].dtype)
    ]
    if wrong:
        named = ", ".join(f"{name:.80}" for name in sorted(wrong)[:10])
        raise ModelFileError(f"{source} is of another optimizer or model: {named} ({len(wrong)} tensors)")


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The arrays of a safetensors file that was checked first. Raises ModelFileError."""
    try:
        check_safetensors(path)
        loaded = mx.load(str(path))
    except MlxinferError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelFileError(f"{path}: {error}") from error
    assert isinstance(loaded, dict)
    return loaded


def load_weights(model: nn.Module, weights: Mapping[str, mx.array], source: str) -> None:
    """Replace all that is trained. Raises ModelFileError that names every tensor missing, extra or misshapen."""
    own: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
    wrong = [f"{name} is missing" for name in own if name not in weights]
    for name, value in weights.items():
        if name not in own:
            wrong.append(f"{name} is nothing that this model trains")
        elif value.shape != own[name].shape:
            wrong.append(f"{name} is {value.shape}; the model has {own[name].shape}")
    if wrong:
        raise ModelFileError(f"{source} is for another model: {'; '.join(wrong[:10])} ({len(wrong)} tensors)")
    model.load_weights([(name, value.astype(own[name].dtype)) for name, value in weights.items()], strict=False)
