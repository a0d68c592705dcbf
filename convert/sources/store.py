"""The tensors of a folder as its files hold them, whatever the format of the files: names, types, shapes, bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from mlxinfer.convert.sources.minifloat import E4M3, E5M2, e8m0
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import open_regular, read_json_object
from mlxinfer.formats.safetensors import INDEX_NAME, MAX_INDEX_BYTES, TensorInfo, check_safetensors, shard_files

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import mlx.core as mx

NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "F8_E4M3": "u1", "F8_E5M2": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip
"""What `Store.read` gives for each type; the others can't be read."""
MLX_READS = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32"})


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of the files."""

    name: str
    dtype: str
    """As safetensors spells it, for example "BF16"."""
    shape: tuple[int, ...]
    nbytes: int
    file: Path

    @property
    def where(self) -> str:
        """How errors name it."""
        return f"{self.file}: tensor {self.name!r:.120}"


class Store(Protocol):
    """Files that are open. Every method raises ModelFileError for a file that changed under it."""

    tensors: Mapping[str, Stored]

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """The values, BF16 and the 8-bit floats as their bits. `part`: that entry of the first axis only."""
        ...

    def lazy(self, name: str) -> mx.array | None:
        """The same as an array that mlx reads from the file when it is evaluated, where it can."""
        ...

    def fingerprint(self) -> str:
        """Differs when the files do, as far as names, sizes, times and headers tell."""
        ...

    def close(self) -> None: ...


def as_float32(values: np.ndarray, stored: Stored) -> np.ndarray:
    """What `Store.read` gave for `stored`, as float32. Exact but for F64. Raises ModelFileError for integers."""
    match stored.dtype:
        case "F32" | "F16":
            return values.astype(np.float32, copy=False)
        case "F64":
            # A number past float32's range becomes infinite, which whoever needs finite ones checks.
            with np.errstate(over="ignore"):
                return values.astype(np.float32)
        case "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        case "F8_E4M3":
            return E4M3[values]
        case "F8_E5M2":
            return E5M2[values]
        case "F8_E8M0":
            return e8m0(values)
    raise ModelFileError(f"{stored.where} is {stored.dtype}; floats are expected there")


class DataFile:
    """A regular file from which spans of bytes are read, from any thread."""

    def __init__(self, path: Path) -> None:
        file = open_regular(path)
        if file is None:
            raise ModelFileError(f"{path} is missing")
        self.path = path
        self._file = cast("io.BufferedReader", file)
        self._lock = threading.Lock()
        self.stat = os.fstat(file.fileno())
        """As it was when the file was opened: what sizes and offsets are checked against."""

    def span(self, offset: int, nbytes: int, where: str) -> np.ndarray:
        """`nbytes` bytes from `offset`; both were checked against the file's size before."""
        data = np.empty(nbytes, dtype=np.uint8)
        try:
            with self._lock:
                self._file.seek(offset)
                count = self._file.readinto(data.data)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{where} cannot be read: {error}") from error
        if count != nbytes:
            raise ModelFileError(f"{where}: the file became shorter while it was read")
        return data

    def stat_now(self) -> os.stat_result:
        """As it is by now. A file that another one replaced under its name is still the one that is read."""
        return os.fstat(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def part_of(shape: tuple[int, ...], nbytes: int, part: int | None) -> tuple[int, int, tuple[int, ...]]:
    """(offset in bytes, bytes, shape) of a tensor or of one entry of its first axis."""
    if part is None:
        return 0, nbytes, shape
    size = nbytes // shape[0]
    return size * range(shape[0])[part], size, shape[1:]


def add_stored(table: dict[str, Stored], stored: Stored, place: str | None) -> bool:
    """Take a tensor of one shard into `table`; False for a copy of one that the index places in another shard.

    Raises ModelFileError for a second one of the same name.
    """
    if place is not None and place != stored.file.name:
        return False
    if other := table.get(stored.name):
        raise ModelFileError(f"{stored.where} is in {other.file.name} as well; remove one")
    table[stored.name] = stored
    return True


class SafetensorsStore:
    """The safetensors files that make up the model in a folder: those of the index, where there is one."""

    def __init__(self, folder: Path) -> None:
        self._infos: dict[str, TensorInfo] = {}
        self._stored: dict[str, Stored] = {}
        self.tensors: Mapping[str, Stored] = self._stored
        self._files: dict[Path, DataFile] = {}
        self._arrays: dict[Path, dict[str, mx.array]] = {}
        places = _weight_map(folder)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for shard in shard_files(folder):
                self._files[shard] = DataFile(shard)
                for name, info in check_safetensors(shard).items():
                    stored = Stored(name, info.dtype, info.shape, info.nbytes, shard)
                    if add_stored(self._stored, stored, places.get(name)):
                        self._infos[name] = info
            for name, file in places.items():
                if name not in self.tensors:
                    raise ModelFileError(
                        f"{folder / file}: tensor {name!r:.120} is missing, which the index places there"
                    )
            undo.pop_all()

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        info, stored = self._infos[name], self.tensors[name]
        if info.dtype not in NUMPY:
            raise UnsupportedModelError(f"{stored.where} is {info.dtype}, which is not read")
        start, nbytes, shape = part_of(info.shape, info.nbytes, part)
        raw = self._files[stored.file].span(info.offset + start, nbytes, stored.where)
        return raw.view(NUMPY[info.dtype]).reshape(shape)

    def lazy(self, name: str) -> mx.array | None:
        import mlx.core as mx

        stored = self.tensors[name]
        if stored.dtype not in MLX_READS:
            return None
        if stored.file not in self._arrays:
            try:
                loaded = mx.load(str(stored.file), format="safetensors")
            except RuntimeError:
                # mlx refuses a whole file for one type that it lacks, such as F64; `read` works all the same.
                loaded = {}
            self._arrays[stored.file] = loaded if isinstance(loaded, dict) else {}
        return self._arrays[stored.file].get(name)

    def fingerprint(self) -> str:
        return fingerprint_of([(f.path, f.stat_now()) for f in self._files.values()], list(self.tensors.values()))

    def close(self) -> None:
        self._arrays.clear()
        for file in self._files.values():
            file.close()


def fingerprint_of(files: Sequence[tuple[Path, os.stat_result]], tensors: Sequence[Stored]) -> str:
    """A hash over names, sizes and times of the files and the table of their tensors."""
    digest = hashlib.sha256()
    for path, stat in sorted(files, key=lambda item: item[0]):
        digest.update(os.fsencode(path.name) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    for tensor in sorted(tensors, key=lambda t: t.name):
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.file.name}\n".encode("utf-8", "replace"))
    return digest.hexdigest()


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor to file name, as the index that `shard_files` goes by says; empty without one."""
    index = folder / INDEX_NAME
    if not index.exists() and not any(folder.glob("model*.safetensors")):
        others = sorted(folder.glob("*.safetensors.index.json"))
        index = others[0] if len(others) == 1 else index
    weight_map = (read_json_object(index, MAX_INDEX_BYTES) or {}).get("weight_map", {})
    # Its form is checked by `shard_files`, which says what is wrong with it.
    return weight_map if isinstance(weight_map, dict) else {}
