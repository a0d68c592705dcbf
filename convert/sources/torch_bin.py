"""pytorch_model*.bin: the zip archives of torch.save, read without torch and without running what they pickle."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.convert.sources import torch_zip
from mlxinfer.convert.sources.store import NUMPY, DataFile, Stored, add_stored, fingerprint_of
from mlxinfer.convert.sources.torch_pickle import MAX_PICKLE_BYTES, TensorView, read_tensors
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import read_json_object
from mlxinfer.formats.safetensors import MAX_INDEX_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import mlx.core as mx

INDEX_NAME = "pytorch_model.bin.index.json"
_NUMBERED = re.compile(r"pytorch_model-\d{5}-of-(?P<count>\d{5})\.bin")
MAX_PIECES = 10_000
_PLAIN_NAME = re.compile(r"[^/\\\0]+\.bin")


class TorchStore:
    """The .bin files that make up the model in a folder (see `store.Store`)."""

    def __init__(self, folder: Path) -> None:
        self._stored: dict[str, Stored] = {}
        self.tensors: Mapping[str, Stored] = self._stored
        self._views: dict[str, tuple[TensorView, int]] = {}
        self._files: dict[Path, DataFile] = {}
        places = _weight_map(folder)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for path in _shards(folder, places):
                self._files[path] = DataFile(path)
                self._open(self._files[path], places)
            for name, file in places.items():
                if name not in self._stored:
                    raise ModelFileError(
                        f"{folder / file}: tensor {name!r:.120} is missing, which the index places there"
                    )
            undo.pop_all()

    def _open(self, file: DataFile, places: Mapping[str, str]) -> None:
        where = str(file.path)
        if file.span(0, min(2, file.stat.st_size), where).tobytes() != b"PK":
            raise UnsupportedModelError(
                f"{where} isn't in the zip format that torch.save writes since torch 1.6; "
                "load it with torch and save it again, best as safetensors"
            )
        members = torch_zip.members(file)
        prefix = _prefix(members, where)
        order = members.get(f"{prefix}byteorder")
        if order and _content(file, f"{prefix}byteorder", order, 16).strip() != b"little":
            raise UnsupportedModelError(f"{where} was saved on a big-endian machine; save it again on another")
        pickled = _content(file, f"{prefix}data.pkl", members[f"{prefix}data.pkl"], MAX_PICKLE_BYTES)
        offsets: dict[str, int] = {}
        for name, view in read_tensors(pickled, where).items():
            member_name = f"{prefix}data/{view.storage.key}"
            if view.storage.key not in offsets:
                offsets[view.storage.key] = _storage_offset(file, members, member_name, view, name)
            itemsize = np.dtype(NUMPY[view.storage.dtype]).itemsize
            nbytes = int(np.prod(view.shape, dtype=object)) * itemsize
            stored = Stored(name, view.storage.dtype, view.shape, nbytes, file.path)
            if add_stored(self._stored, stored, places.get(name)):
                self._views[name] = (view, offsets[view.storage.key])

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        view, start = self._views[name]
        stored = self._stored[name]
        dtype = np.dtype(NUMPY[stored.dtype])
        offset, shape, strides = view.offset, view.shape, view.strides
        if part is not None:
            offset += range(shape[0])[part] * strides[0]
            shape, strides = shape[1:], strides[1:]
        if 0 in shape:
            return np.empty(shape, dtype)
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        raw = self._files[stored.file].span(start + offset * dtype.itemsize, count * dtype.itemsize, stored.where)
        steps = [stride * dtype.itemsize for stride in strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw.view(dtype), shape, steps))

    def lazy(self, name: str) -> mx.array | None:
        return None

    def fingerprint(self) -> str:
        return fingerprint_of([(f.path, f.stat_now()) for f in self._files.values()], list(self._stored.values()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _prefix(members: Mapping[str, torch_zip.Member], where: str) -> str:
    """The folder inside the archive in which data.pkl lies."""
    found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise ModelFileError(f"{where} has {len(found)} data.pkl; an archive of torch.save has one")
    return found[0].removesuffix("data.pkl")


def _content(file: DataFile, name: str, member: torch_zip.Member, limit: int) -> bytes:
    if member.nbytes > limit:
        raise ModelFileError(f"{file.path}: {name} has {member.nbytes} bytes; at most {limit} are read")
    return file.span(torch_zip.data_offset(file, name, member), member.nbytes, f"{file.path}: {name}").tobytes()


def _storage_offset(
    file: DataFile, members: Mapping[str, torch_zip.Member], member_name: str, view: TensorView, name: str
) -> int:
    member = members.get(member_name)
    if member is None:
        raise ModelFileError(f"{file.path}: tensor {name!r:.120} needs {member_name!r:.120}, which the archive lacks")
    needed = view.storage.count * np.dtype(NUMPY[view.storage.dtype]).itemsize
    if member.nbytes != needed:
        raise ModelFileError(
            f"{file.path}: {member_name} has {member.nbytes} bytes, tensor {name!r:.120} says {needed}"
        )
    return torch_zip.data_offset(file, member_name, member)


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_NAME
    table = read_json_object(index, MAX_INDEX_BYTES)
    if table is None:
        return {}
    names = table.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFileError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ModelFileError(f"{index}: weight_map names {name!r:.120}; a plain *.bin file name is expected")
    return names


def _shards(folder: Path, places: Mapping[str, str]) -> list[Path]:
    if places:
        return [folder / name for name in sorted(set(places.values()))]
    whole = folder / "pytorch_model.bin"
    if whole.exists():
        return [whole]
    pieces = sorted(p for p in folder.glob("pytorch_model-*.bin") if _NUMBERED.fullmatch(p.name))
    counts = {match["count"] for p in pieces if (match := _NUMBERED.fullmatch(p.name))}
    if len(counts) != 1:
        raise ModelFileError(f"{folder} holds no pytorch_model.bin, and no one set of numbered pieces of it")
    (count,) = counts
    if not 1 <= int(count) <= MAX_PIECES:
        raise ModelFileError(f"{pieces[0]} says that there are {int(count)} pieces; 1 to {MAX_PIECES} are read")
    return [folder / f"pytorch_model-{i:05}-of-{count}.bin" for i in range(1, int(count) + 1)]
