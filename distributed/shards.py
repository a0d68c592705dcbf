"""A model cut for the ranks of a plan, offline and one rank at a time; and a rank's part put together again.

A part is a folder: config.json, `shard.json` (what part this is, its packed layers, a SHA-256 for each file) and
safetensors files of at most about FILE_BYTES. Cutting reads lazily: it takes the memory of one file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxinfer import upstream
from mlxinfer.distributed.groups import PretendGroup
from mlxinfer.distributed.ways import split_model
from mlxinfer.engine.dtypes import apply_dtype_policy
from mlxinfer.engine.fingerprint import fingerprint
from mlxinfer.errors import ConversionError, ModelFileError
from mlxinfer.formats.files import json_bytes, read_json_object, replace_file, sha256_of
from mlxinfer.formats.safetensors import check_dtypes, check_safetensors, shard_files

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "shard.json"
FILE_BYTES = 1 << 30
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a model: of `size` ranks this one, split by heads, by layers, or by layers for pairs that share
    them by heads."""

    kind: Literal["tensor", "pipeline", "both"]
    rank: int
    size: int
    split: tuple[int, ...] = ()
    """Of a pipeline: layers by stage, the last layers first."""

    @property
    def stage(self) -> int:
        """Of a pipeline; with "both" two ranks are one."""
        return self.rank // 2 if self.kind == "both" else self.rank

    @property
    def name(self) -> str:
        """Of its folder."""
        ways = "-".join(map(str, self.split)) or "heads"
        return f"{self.kind}-{ways}-rank-{self.rank}-of-{self.size}"


def cut(source: Path, part: Part, target: Path) -> Path:
    """Write `part` of the model in the folder `source` below `target`, and return its folder.

    A part that is whole already is left alone; one that was broken off is begun again. Raises ModelFileError,
    InvalidRequestError where the model can't be cut like that, ConversionError where the disk says no.
    """
    folder = target / part.name
    of = fingerprint("folder", source, {})
    with contextlib.suppress(ModelFileError):
        if (_manifest(folder) or {}).get("source") == of and not damaged(folder):
            return folder
    files = shard_files(source)
    check_dtypes({name: info for file in files for name, info in check_safetensors(file).items()}, str(source))
    model, config = upstream.load_folder(source, files)
    names = split(model, part, PretendGroup(part.rank, part.size))
    work = target / f".{part.name}.new"
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        packed, held = _packed(model), dict(tree_flatten(model.parameters()))
        weights: dict[str, Any] = {name: held[name] for name in names}
        # Nobody else holds them: each is let go of once it is written.
        del model, held
        sums = _write(weights, work)
        for name in KEPT:
            if name != "config.json" and (source / name).is_file():
                shutil.copyfile(source / name, work / name)
        replace_file(work / "config.json", json_bytes(config))
        about = {"part": asdict(part), "source": of, "packed": packed, "files": sums}
        replace_file(work / MANIFEST, json_bytes(about))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(work, folder)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise ConversionError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def load(folder: Path, group: Any, *, dtype: str = "auto") -> tuple[nn.Module, dict[str, Any], Part]:
    """The model of a part, its weights read and checked; `group` is the real one, None where
    there is but one rank. On the MLX thread.

    Raises ModelFileError for a part that is damaged, or for another rank or number of ranks.
    """
    about = _manifest(folder)
    config = read_json_object(folder / "config.json")
    if about is None or config is None:
        raise ModelFileError(f"{folder} is no part of a model: {MANIFEST} or config.json is missing")
    part = _part_of(about, folder)
    group = group or PretendGroup(0, 1)
    if (part.rank, part.size) != (group.rank(), group.size()):
        raise ModelFileError(
            f"{folder} is the part of rank {part.rank} of {part.size}; this is rank {group.rank()} of {group.size()}"
        )
    if wrong := damaged(folder):
        raise ModelFileError(f"{folder}: {wrong}; cut or copy the part again")
    model = upstream.empty_model(config)
    packed: dict[str, Any] = about.get("packed") or {}
    if packed:
        # Layers that the model's own code makes packed stay as they are.
        nn.quantize(model, class_predicate=lambda path, made: "scales" not in made and packed.get(path, False))
    names = split(model, part, group)
    weights: dict[str, mx.array] = {}
    for name in about["files"]:
        check_safetensors(folder / name)
        found: Any = mx.load(str(folder / name))
        weights |= found
    if weights.keys() != names:
        off = sorted(weights.keys() ^ names)
        raise ModelFileError(f"{folder}: {len(off)} tensors are missing or too many, the first is {off[0]}")
    model.eval()
    try:
        model.load_weights(list(weights.items()), strict=False)
    except ValueError as error:
        raise ModelFileError(f"{folder}: {error}") from error
    apply_dtype_policy(model, dtype)
    held: Any = dict(tree_flatten(model.parameters()))
    mx.eval([held[name] for name in names if name in held])
    return model, config, part


def split(model: nn.Module, part: Part, group: Any) -> set[str]:
    """Split `model` in place, and return the names of the parameters that this rank needs.

    Raises InvalidRequestError where its code can't be split like that.
    """
    split_model(model, part.kind, part.split, group)
    held: Any = tree_flatten(model.parameters())
    names = {name for name, _ in held}
    return names if part.kind == "tensor" or part.size == 1 else {name for name in names if _needed(name, part)}


def _needed(name: str, part: Part) -> bool:
    """Of a stage: its layers; the first one embeds, the last, number 0, has the head, which may be the embedding."""
    if ".layers." in name:
        return True
    return part.stage == 0 or (part.stage == len(part.split) - 1 and "embed" in name)


def _packed(model: nn.Module) -> dict[str, dict[str, Any]]:
    """How each packed layer is packed: a split part's shapes don't tell."""
    return {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": getattr(module, "mode", "affine")}
        for path, module in model.named_modules()
        if "scales" in module and hasattr(module, "bits")
    }


def _write(weights: dict[str, mx.array], folder: Path) -> dict[str, str]:
    """Files of at most about FILE_BYTES, and their sums."""
    sums: dict[str, str] = {}
    batch: dict[str, mx.array] = {}

    def flush() -> None:
        if batch:
            name = f"model-{len(sums):05d}.safetensors"
            mx.eval(list(batch.values()))
            mx.save_safetensors(str(folder / name), batch, metadata={"format": "mlx"})
            with (folder / name).open("rb+") as file:
                os.fsync(file.fileno())
            sums[name] = sha256_of(folder / name)
            batch.clear()

    for name in sorted(weights):
        if batch and sum(array.nbytes for array in batch.values()) + weights[name].nbytes > FILE_BYTES:
            flush()
        batch[name] = weights.pop(name)
    flush()
    return sums


def damaged(folder: Path) -> str:
    """What is wrong with the files of a part, in words; "" where nothing is. Reads them all."""
    about = _manifest(folder)
    if about is None:
        return f"{MANIFEST} is missing"
    for name, wanted in about["files"].items():
        try:
            found = sha256_of(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != wanted:
            return f"{name} is damaged"
    return ""


def _manifest(folder: Path) -> dict[str, Any] | None:
    about = read_json_object(folder / MANIFEST)
    if about is not None:
        files = about.get("files")
        plain = isinstance(files, dict) and all("/" not in name and name.endswith(".safetensors") for name in files)
        if not plain:
            raise ModelFileError(f"{folder / MANIFEST} names no files of its folder")
    return about


def _part_of(about: dict[str, Any], folder: Path) -> Part:
    try:
        held = dict(about["part"])
        part = Part(held["kind"], int(held["rank"]), int(held["size"]), tuple(map(int, held["split"])))
    except (TypeError, KeyError, ValueError) as error:
        raise ModelFileError(f"{folder / MANIFEST} says of no part what it is: {error}") from error
    stages = {"tensor": 0, "pipeline": part.size, "both": part.size / 2}.get(part.kind)
    if len(part.split) != stages or not 0 <= part.rank < part.size:
        raise ModelFileError(f"{folder / MANIFEST} says of no part what it is: {part.name:.100}")
    return part
