"""The header of a safetensors file, checked before any library maps it, and the files that make up a model folder.

mlx's own loader accepts overlapping offsets and reads every model*.safetensors it finds; both are settled here.
Layout: 8 bytes of header length, a JSON object of name to {dtype, shape, data_offsets}, then the data without gaps.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_HEADER_BYTES = 32 * 2**20
"""About 250,000 tensors; the largest published shards have a few thousand."""
MAX_INDEX_BYTES = 64 * 2**20
MAX_TENSORS = 250_000
MAX_DIMENSIONS = 16

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
INTEGERS = frozenset({"U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
BYTES = frozenset({"U8", "I8"})
INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a header."""

    name: str
    dtype: str
    """As the file spells it, for example "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def check_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of `path` by name, in the order of the header. Reads the header only.

    Raises ModelFileError, which names file, field, value and limit, for a file that is missing, truncated, corrupt or
    hostile: unknown dtypes, shapes that do not fit their data, overlaps, gaps, data past the end of the file.
    """
    header, start, size = _read_header(path)
    entries = _parse_object(path, header)
    # mlx writes null where it was given no metadata.
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise ModelFileError(f"{path}: __metadata__ must map strings to strings")
    if len(entries) > MAX_TENSORS:
        raise ModelFileError(f"{path}: the header lists {len(entries)} tensors; at most {MAX_TENSORS}")
    tensors = {name: _check_entry(path, name, entry, start) for name, entry in entries.items()}
    _check_cover(path, tensors, start, size)
    return tensors


def _read_header(path: Path) -> tuple[bytes, int, int]:
    """(header, where the data start, size of the file)."""
    file = open_regular(path)
    if file is None:
        raise ModelFileError(f"{path} is missing")
    try:
        with file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise ModelFileError(
                    f"{path}: a header of {length} bytes in a file of {size}; it is truncated or no safetensors file"
                )
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ModelFileError(f"{path}: a header of {length} bytes; it must have 2 to {MAX_HEADER_BYTES}")
            header = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(header) < length:
        raise ModelFileError(f"{path}: the file became shorter while it was read")
    return header, 8 + length, size


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """A JSON object without doubled keys."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) != len(items):
            seen: set[str] = set()
            double = next(key for key, _ in items if key in seen or seen.add(key))
            raise ModelFileError(f"{path}: the key {double!r:.120} occurs twice")
        return table

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:
        raise ModelFileError(f"{path}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}"[:400]) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def _check_entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r:.120}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ModelFileError(f"{where}: dtype {dtype!r:.40} is unknown; known: {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ModelFileError(f"{where}: shape {shape!r:.80} must be up to {MAX_DIMENSIONS} integers of 0 or more")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(f"{where}: data_offsets {offsets!r:.80} must be a begin and an end")
    count = bits
    for axis in shape:
        count *= axis
    nbytes = offsets[1] - offsets[0]
    if count != nbytes * 8:
        raise ModelFileError(f"{where}: {dtype} of shape {shape!r:.80} does not take {nbytes} bytes")
    return TensorInfo(name, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_cover(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """The data follow one another from `start` to the end of the file."""
    end = start
    for info in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if info.offset != end:
            problem = "overlaps the tensor before it" if info.offset < end else "leaves a gap before it"
            raise ModelFileError(
                f"{path}: tensor {info.name!r:.120} at byte {info.offset} {problem} (which ends at {end})"
            )
        end += info.nbytes
    if end > size:
        raise ModelFileError(f"{path}: the tensors end at byte {end}, the file at {size}; it is truncated")
    if end < size:
        raise ModelFileError(f"{path}: {size - end} bytes after the last tensor belong to nothing")


def check_dtypes(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Refuse weights whose dtype can't be meant: integers where a model computes with floats.

    mlx would read the bits of a relabelled tensor as numbers, and the model would answer nonsense. `tensors` are those
    of all shards together, since a weight and its scales may lie in two files. Raises ModelFileError; `where` begins
    its message. A `.weight` may hold integers only if the same module has scales of some kind: mlx's packed words are
    U32 beside `.scales`; other quantizers use bytes and words beside `.weight_scale`, `.SCB` or `.weight.absmax`. Bytes
    in a `.bias` are a mask in some older models, and all other names are left alone: index tables are integers rightly.
    """
    explained = {
        name.rpartition(".")[0].removesuffix(".weight")
        for name in tensors
        if any(word in name.rpartition(".")[2].lower() for word in ("scale", "scb", "absmax"))
    }
    for name, info in tensors.items():
        stem, _, last = name.rpartition(".")
        packed = f"{stem}.scales" in tensors
        if last == "weight" and packed and info.dtype in INTEGERS - BYTES:
            wrong = info.dtype != "U32"
        elif last == "weight":
            wrong = info.dtype in INTEGERS and stem not in explained
        elif last == "scales":
            wrong = info.dtype in INTEGERS - BYTES
        else:
            wrong = last in ("bias", "biases") and info.dtype in INTEGERS - BYTES
        if wrong:
            raise ModelFileError(f"{where}: tensor {name!r:.120} is {info.dtype}; floats are expected there")


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model in `folder`, in order. Files may be symbolic links.

    The index decides where there is one: files it doesn't name are left alone. Without one, all model*.safetensors, or,
    where there are none, every other *.safetensors that is no adapter. Raises ModelFileError for an index that is
    broken or points out of the folder, and for a missing shard, by name.
    """
    index = folder / INDEX_NAME
    found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("adapter"))
    own = [p for p in found if p.name.startswith("model")]
    if not index.exists() and not own:
        others = sorted(folder.glob("*.safetensors.index.json"))
        index = others[0] if len(others) == 1 else index
    shards = _indexed(index) if index.exists() else _all_of(own or found)
    if not shards:
        raise ModelFileError(f"{folder} holds no model*.safetensors")
    for shard in shards:
        # Path.is_file raises for a name that is too long.
        if not os.path.isfile(shard):
            raise ModelFileError(f"{folder}: the shard {shard.name:.120} is missing; fetch the model again")
    return shards


def _indexed(index: Path) -> list[Path]:
    data = read_regular(index, MAX_INDEX_BYTES)
    if data is None:
        raise ModelFileError(f"{index} is missing")
    names = _parse_object(index, data).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelFileError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise ModelFileError(
                f"{index}: weight_map names {name!r:.120}; a plain *.safetensors file name is expected"
            )
    return [index.with_name(name) for name in sorted(set(names.values()))]


def _all_of(found: list[Path]) -> list[Path]:
    """`found` and, where a name says -00001-of-00003, the ones it says there are."""
    shards = set(found)
    for path in found:
        if match := _NUMBERED.fullmatch(path.name):
            count = min(int(match["count"]), 10_000)
            shards |= {
                path.with_name(f"{match['stem']}-{i:05}-of-{match['count']}.safetensors") for i in range(1, count + 1)
            }
    return sorted(shards)
