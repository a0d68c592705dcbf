"""The file of one entry of the disk tier: what a token prefix left, as named arrays.

    96 bytes   magic, version, sizes, digest of the body, digest of all that stands before the body
    JSON       fingerprint, key, checkpoints, meta, and dtype, shape and offset of each array
    tokens     4 bytes each, then zeros up to a multiple of 64
    body       the arrays, each at a multiple of 64

Whoever can write to the folder may have made the file: each number is checked against a limit and the file's size
before anything is allocated for it. Not refused: a well-made file with wrong numbers in it; the folder is 0700 for
that. Nothing is mapped into memory, because a file that another process shortens would then kill this one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import struct
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

MAGIC = b"mlxikv\r\n"
VERSION = 1
PREFIX = struct.Struct("<8sIIQQ32s32s")
"""Magic, version, bytes of JSON, tokens, bytes of the body, digest of the body, digest of the head."""
ALIGN = 64
CHUNK = 1 << 20
"""The body's digest is one over the digests of pieces of this size, so that threads share the work."""
MAX_JSON_BYTES = 16 << 20
MAX_TOKENS = 1 << 22
MAX_ARRAYS = 65_536
MAX_DIMENSIONS = 8
MAX_NAME = 256

DTYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{bits}": np.dtype(f"<{kind[0]}{bits // 8}") for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "bool": np.dtype("?"),
}
"""mlx's name of a dtype → how numpy holds it; numpy has no bfloat16."""


class DamagedError(Exception):
    """The file can't be what was written."""


class ForeignError(Exception):
    """Another version's or another model's file, sound as far as one can tell."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """`data` holds elements of mlx's `dtype` as DTYPES says."""

    name: str
    dtype: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Head:
    """Everything but the arrays' contents. `places` are (name, dtype, shape, offset in the body)."""

    fingerprint: str
    key: str
    tokens: array[int]
    checkpoints: tuple[int, ...]
    meta: dict[str, Any]
    places: tuple[tuple[str, str, tuple[int, ...], int], ...]
    body_start: int
    body_bytes: int
    body_digest: bytes
    digest: bytes


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class BodyDigest:
    """The digest of a body that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._leaf = hashlib.sha256()
        self._room = CHUNK

    def update(self, data: memoryview) -> None:
        while data:
            part = data[: self._room]
            self._leaf.update(part)
            self._room -= len(part)
            data = data[len(part) :]
            if not self._room:
                self._end_leaf()

    def _end_leaf(self) -> None:
        self._leaves.append(self._leaf.digest())
        self._leaf, self._room = hashlib.sha256(), CHUNK

    def digest(self) -> bytes:
        if self._room < CHUNK:
            self._end_leaf()
        return hashlib.sha256(b"".join(self._leaves)).digest()


def encode_head(
    fingerprint: str,
    key: str,
    tokens: array[int],
    checkpoints: Sequence[int],
    arrays: Sequence[StoredArray],
    meta: Mapping[str, Any],
    body_digest: bytes,
) -> bytes:
    """All that stands before the body. Its length doesn't depend on `body_digest`, which is known last.

    Raises ValueError for what `read_head` would refuse.
    """
    rows: list[list[Any]] = []
    at = 0
    for one in arrays:
        if DTYPES.get(one.dtype) != one.data.dtype:
            raise ValueError(f"array {one.name!r}: {one.data.dtype} doesn't hold {one.dtype!r}")
        rows.append([one.name, one.dtype, list(one.data.shape), at])
        at = aligned(at + one.data.nbytes)
    values = {"fingerprint": fingerprint, "key": key, "checkpoints": list(checkpoints), "meta": meta, "arrays": rows}
    text = json.dumps(values, allow_nan=False, separators=(",", ":")).encode()
    ids = np.asarray(tokens, "<u4").tobytes()
    _check_values(json.loads(text), len(tokens), at)
    if len(text) > MAX_JSON_BYTES or not 0 < len(tokens) <= MAX_TOKENS:
        raise ValueError(f"{len(text)} bytes of JSON and {len(tokens)} tokens; at most {MAX_JSON_BYTES}, {MAX_TOKENS}")
    size = PREFIX.size + len(text) + len(ids)
    rest = text + ids + bytes(aligned(size) - size)
    numbers = (MAGIC, VERSION, len(text), len(tokens), at, body_digest)
    start = PREFIX.pack(*numbers, bytes(32))[:-32]
    return start + hashlib.sha256(start + rest).digest() + rest


def body_pieces(arrays: Sequence[StoredArray]) -> Iterator[memoryview]:
    """The bytes of the body in order; at most one array at a time is copied, and only if it isn't contiguous."""
    for one in arrays:
        data = np.ascontiguousarray(one.data).reshape(-1).view(np.uint8)
        yield data.data
        if padding := aligned(data.nbytes) - data.nbytes:
            yield memoryview(bytes(padding))


def open_entry(path: Path) -> int:
    """A descriptor of a regular file that is no link. Raises OSError or DamagedError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError("no regular file")
    return descriptor


def read_head(descriptor: int) -> Head:
    """Read and check all but the body. Raises DamagedError, ForeignError (another version) or OSError."""
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, PREFIX.size, 0)
    if len(start) < PREFIX.size:
        raise DamagedError(f"{len(start)} bytes")
    magic, version, json_bytes, count, body_bytes, body_digest, digest = PREFIX.unpack(start)
    if magic != MAGIC:
        raise DamagedError("not an entry")
    if version != VERSION:
        raise ForeignError(f"version {version}")
    if json_bytes > MAX_JSON_BYTES or not 0 < count <= MAX_TOKENS:
        raise DamagedError(f"{json_bytes} bytes of JSON and {count} tokens")
    body_start = aligned(PREFIX.size + json_bytes + 4 * count)
    if body_start + body_bytes != size:
        raise DamagedError(f"{size} bytes instead of {body_start + body_bytes}")
    rest = os.pread(descriptor, body_start - PREFIX.size, PREFIX.size)
    if hashlib.sha256(start[:-32] + rest).digest() != digest:
        raise DamagedError("the head's digest differs")
    try:
        values = json.loads(rest[:json_bytes])
    except (ValueError, RecursionError) as error:
        raise DamagedError("unreadable JSON") from error
    tokens = array("I", np.frombuffer(rest, "<u4", count, json_bytes).astype("=u4").tobytes())
    try:
        places = _check_values(values, count, body_bytes)
    except ValueError as error:
        raise DamagedError(str(error)) from error
    return Head(
        fingerprint=values["fingerprint"],
        key=values["key"],
        tokens=tokens,
        checkpoints=tuple(values["checkpoints"]),
        meta=values["meta"],
        places=places,
        body_start=body_start,
        body_bytes=body_bytes,
        body_digest=body_digest,
        digest=digest,
    )


def read_body(descriptor: int, head: Head) -> list[StoredArray]:
    """The arrays, as views of one buffer. Raises DamagedError or OSError."""
    body = np.empty(head.body_bytes, np.uint8)
    view = body.data

    def leaf(at: int) -> bytes:
        piece = view[at : at + CHUNK]
        done = 0
        while done < len(piece):
            count = os.preadv(descriptor, [piece[done:]], head.body_start + at + done)
            if not count:
                raise DamagedError("the file became shorter while it was read")
            done += count
        return hashlib.sha256(piece).digest()

    with ThreadPoolExecutor(_threads()) as pool:
        digests = b"".join(pool.map(leaf, range(0, head.body_bytes, CHUNK)))
    if hashlib.sha256(digests).digest() != head.body_digest:
        raise DamagedError("the body's digest differs")
    arrays: list[StoredArray] = []
    for name, dtype, shape, offset in head.places:
        kind = DTYPES[dtype]
        end = offset + kind.itemsize * _count(shape)
        arrays.append(StoredArray(name, dtype, body[offset:end].view(kind).reshape(shape)))
    return arrays


def _threads() -> int:
    return min(4, os.cpu_count() or 1)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for axis in shape:
        count *= axis
    return count


def _check_values(
    values: object, token_count: int, body_bytes: int
) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
    """The places of the arrays; raises ValueError for anything that `encode_head` doesn't write."""
    if not isinstance(values, dict) or values.keys() != {"fingerprint", "key", "checkpoints", "meta", "arrays"}:
        raise ValueError("not the fields of a head")
    checkpoints, rows = values["checkpoints"], values["arrays"]
    if not isinstance(values["fingerprint"], str) or not isinstance(values["key"], str):
        raise ValueError("fingerprint and key must be strings")
    if not isinstance(values["meta"], dict):
        raise ValueError("meta must be an object")
    if not _are_counts(checkpoints) or any(a >= b for a, b in itertools.pairwise([0, *checkpoints, token_count + 1])):
        raise ValueError(f"checkpoints must rise from 1 to at most {token_count}")
    if not isinstance(rows, list) or len(rows) > MAX_ARRAYS:
        raise ValueError(f"arrays must be a list of at most {MAX_ARRAYS}")
    places: list[tuple[str, str, tuple[int, ...], int]] = []
    at = 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError("an array needs name, dtype, shape and offset")
        name, dtype, shape, offset = row
        if not isinstance(name, str) or len(name) > MAX_NAME or not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"array {name!r:.80}: unknown dtype {dtype!r:.40}, or a name of more than {MAX_NAME}")
        if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or type(offset) is not int or offset != at:
            raise ValueError(f"array {name!r:.80}: shape {shape!r:.80} at {offset!r:.40}")
        at = aligned(at + DTYPES[dtype].itemsize * _count(shape))
        places.append((name, dtype, tuple(shape), offset))
    if at != body_bytes or len({place[0] for place in places}) != len(places):
        raise ValueError("arrays that don't fill the body, or a name that occurs twice")
    return tuple(places)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**40 for v in value)
