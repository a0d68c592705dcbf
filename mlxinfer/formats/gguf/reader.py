"""The header of a GGUF file, with every count, length and offset checked before it is used.

Not the `gguf` package's own reader: on a hostile file it asks for as much memory as the file claims. That package
gives the tables of tensor types. mlx's loader is never used: it crashes the process on the same files.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.files import open_regular
from mlxinfer.formats.gguf.cursor import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 256
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 65_536
MAX_SPLITS = 1024
DEFAULT_ALIGNMENT = 32

_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in row-major order: the last axis is contiguous."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    path: Path
    offset: int
    """Bytes from the start of the file."""
    nbytes: int

    @property
    def size(self) -> int:
        """Elements."""
        count = 1
        for axis in self.shape:
            count *= axis
        return count

    def read(self, start: int = 0, rows: int | None = None) -> np.ndarray:
        """The stored bytes, uint8 of shape (rows, bytes per row), of all or some rows.

        A copy: a mapping of a file that shrinks kills.
        """
        count = self.size // self.shape[-1]
        row_bytes = self.nbytes // count
        wanted = (count if rows is None else rows) * row_bytes
        file = open_regular(self.path)
        if file is None:
            raise ModelFileError(f"{self.path} is gone")
        with file:
            data = np.fromfile(file, dtype=np.uint8, count=wanted, offset=self.offset + start * row_bytes)
        if data.size != wanted:
            raise ModelFileError(f"{self.path}: tensor {self.name} has {data.size} of its {wanted} bytes")
        return data.reshape(-1, row_bytes)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header. `metadata` values are bool, int, float, str or a list of those."""

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """For example "llama"."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str) or not value:
            raise ModelFileError(f"{self.path}: general.architecture is {value!r:.80}; it must name an architecture")
        return value

    @property
    def weight_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of `path`; of a split model, of all its parts (given the first).

    Raises ModelFileError for a file that is missing, corrupt, truncated or hostile, and UnsupportedModelError for a
    version or byte order that is not read.
    """
    first = _read_one(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return first
    tensors = dict(first.tensors)
    for number, part in enumerate(_split_paths(path, first, count), start=1):
        other = _read_one(part)
        if other.metadata.get("split.no") != number or other.metadata.get("split.count") != count:
            raise ModelFileError(f"{part}: split.no and split.count do not say part {number} of {count}")
        if doubles := tensors.keys() & other.tensors.keys():
            raise ModelFileError(f"{part}: tensor {min(doubles)} is in an earlier part already")
        tensors |= other.tensors
    return GGUFFile(path, first.version, first.metadata, tensors)


def _split_paths(path: Path, first: GGUFFile, count: int) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if count > MAX_SPLITS:
        raise ModelFileError(f"{path}: split.count is {count}; at most {MAX_SPLITS}")
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: part of a split model of {count}; its name must end in -00001-of-{count:05}.gguf"
        )
    if first.metadata.get("split.no") != 0:
        raise ModelFileError(f"{path}: open the first part, {match['stem']}-00001-of-{count:05}.gguf")
    return [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(2, count + 1)]


def _read_one(path: Path) -> GGUFFile:
    file = open_regular(path)
    if file is None:
        raise ModelFileError(f"{path} is missing")
    try:
        with file:
            cursor = Cursor(file, str(path), os.fstat(file.fileno()).st_size)
            version, tensor_count, metadata_count = _read_preamble(cursor, path)
            metadata = _read_metadata(cursor, metadata_count)
            alignment = _alignment(cursor, metadata)
            table = [_read_tensor(cursor) for _ in range(tensor_count)]
            start = -(-cursor.position // alignment) * alignment
            return GGUFFile(path, version, metadata, _place(cursor, path, table, start, alignment))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_preamble(cursor: Cursor, path: Path) -> tuple[int, int, int]:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.fail("magic", f"{magic!r} instead of {MAGIC!r}; this is not a GGUF file")
    version = cursor.u32("version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModelError(f"{path} is a big-endian GGUF file; only little-endian ones are read")
    if version not in VERSIONS:
        raise UnsupportedModelError(f"{path} has GGUF version {version}; versions {VERSIONS} are read")
    tensor_count, metadata_count = cursor.u64("tensor count"), cursor.u64("metadata count")
    for field, count, limit in (
        ("tensor count", tensor_count, MAX_TENSORS),
        ("metadata count", metadata_count, MAX_METADATA),
    ):
        if count > limit:
            raise cursor.fail(field, f"{count}; at most {limit}")
    return version, tensor_count, metadata_count


def _read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        key = cursor.text(f"key of metadata {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail(f"metadata {key!r:.80}", "the key occurs twice")
        metadata[key] = cursor.value(cursor.u32(f"type of metadata {key!r:.80}"), f"metadata {key!r:.80}")
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise cursor.fail("general.alignment", f"{value!r:.40}; it must be a power of two up to {MAX_ALIGNMENT}")
    return value


def _read_tensor(cursor: Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    """One entry of the tensor table: name, shape, type and offset from the start of the data."""
    name = cursor.text("name of a tensor", MAX_NAME_BYTES)
    field = f"tensor {name!r}"
    ndim = cursor.u32(field)
    if not 1 <= ndim <= MAX_DIMENSIONS:
        raise cursor.fail(field, f"{ndim} dimensions; it must have 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.u64(field) for _ in range(ndim))[::-1]
    if 0 in shape:
        raise cursor.fail(field, f"a dimension of 0 in {shape}")
    number = cursor.u32(field)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise cursor.fail(field, f"tensor type {number} is unknown; a newer `gguf` package may know it") from None
    return name, shape, kind, cursor.u64(field)


def _place(
    cursor: Cursor,
    path: Path,
    table: Iterable[tuple[str, tuple[int, ...], GGMLQuantizationType, int]],
    start: int,
    alignment: int,
) -> dict[str, GGUFTensor]:
    """Turn relative offsets into places inside the file that do not overlap."""
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in table:
        field = f"tensor {name!r}"
        if name in tensors:
            raise cursor.fail(field, "the name occurs twice")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise cursor.fail(field, f"a row of {shape[-1]} elements; {kind.name} has blocks of {block}")
        nbytes = block_bytes * (shape[-1] // block)
        for axis in shape[:-1]:
            nbytes *= axis
        if offset % alignment:
            raise cursor.fail(field, f"offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + nbytes > cursor.size:
            raise cursor.fail(field, f"offset {offset} and {nbytes} bytes of data reach past the end of the file")
        tensors[name] = GGUFTensor(name, shape, kind, path, start + offset, nbytes)
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.fail(f"tensor {after.name!r}", f"its data overlap those of {before.name!r}")
    return tensors
