"""The bytes of a planned parameter, a few rows at a time, so that memory is bounded by one tensor of the source.

Rows of a matrix are packed independently, so that a large one goes through mlx in chunks and comes out with the same
bits as in one go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer.convert.planning import DTYPE_BYTES, FLOATS
from mlxinfer.errors import ConversionError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlxinfer.convert.planning import Item, Plan
    from mlxinfer.convert.quantizing import Quantizer
    from mlxinfer.convert.sources.base import Source
    from mlxinfer.convert.tracing import Key, Tracer

CHUNK_BYTES = 4 << 20
"""Of a matrix that is cast or packed at a time."""
BATCH_BYTES = 64 << 20
"""Inputs of the model's own code that are read together, to run it less often. A single result may need more."""
SMALL_PART = 1 << 16
"""Values below which the parts of a tensor are read together: channels of a convolution, not experts."""
WIDTH = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of precision. float16 has the fewest bits of exponent too."""
EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""All bits of the exponent, which only infinities and NaN have set."""


@dataclass(slots=True)
class Made:
    """The next bytes of each of an item's tensors, in their order."""

    arrays: tuple[np.ndarray, ...]
    rounded: bool
    """Values didn't survive a change of dtype unchanged."""


class Maker:
    """Makes the bytes of a plan's items, best in the plan's order."""

    def __init__(self, source: Source, tracer: Tracer, plan: Plan, quantizer: Quantizer) -> None:
        self._source = source
        self._tracer = tracer
        self._quantizer = quantizer
        self._position = {item.output.name: number for number, item in enumerate(plan.items)}
        self._items = plan.items
        self._computed: dict[Key, mx.array] = {}

    def make(self, item: Item) -> Iterator[Made]:
        """Raises ModelFileError, or ConversionError for values that the dtype can't hold."""
        if item.kept:
            yield from self._kept(item)
            return
        for matrix in self._arrays(item):
            stored_so = item.dtype == item.output.dtype and item.packing is None
            if stored_so and isinstance(matrix, np.ndarray):
                yield Made((np.ascontiguousarray(matrix),), False)
                continue
            for chunk in _chunks(matrix, rows=item.packing is not None):
                yield self._cast_and_packed(item, chunk)

    def _cast_and_packed(self, item: Item, chunk: mx.array) -> Made:
        cast, rounded = _cast(chunk, item.dtype, item.output.name)
        if item.packing is None:
            return Made((_as_numpy(cast),), rounded)
        if not _is_finite(cast):
            raise ConversionError(
                f"{item.output.name} holds infinities or NaN, which can't be packed: the source is damaged, or a plan "
                'has to keep this tensor as "float"'
            )
        words, scales, biases = self._quantizer(cast, item.packing)
        parts = [words, scales] if biases is None else [words, scales, biases]
        mx.eval(parts)
        for part, stored in zip(parts, item.tensors, strict=True):
            if part.shape[-1] != stored.shape[-1] or _dtype_of(part) != stored.dtype:
                raise AssertionError(f"{stored.name}: the quantizer gave {part.shape} {part.dtype}")
        # What packing does to the values is the report's to say; only a changed dtype is noted here.
        return Made(tuple(_as_numpy(part) for part in parts), rounded)

    def _kept(self, item: Item) -> Iterator[Made]:
        for piece in item.output.pieces:
            assert piece.source is not None, "only renamed and stacked tensors keep their codes"
            for part in self._parts(piece.source):
                packed = self._source.read_packed(piece.source, part)
                scales, rounded = self._scale(packed.scales, item, 1)
                arrays = [packed.weight, scales]
                if packed.biases is not None:
                    biases, also = self._scale(packed.biases, item, 2)
                    arrays.append(biases)
                    rounded = rounded or also
                if len(arrays) != len(item.tensors):
                    raise ModelFileError(f"{self._source.path}: {piece.source} was read as {len(arrays)} arrays")
                yield Made(tuple(np.ascontiguousarray(a) for a in arrays), rounded)

    def _scale(self, values: np.ndarray, item: Item, number: int) -> tuple[np.ndarray, bool]:
        dtype = item.tensors[number].dtype
        if _same(values, dtype):
            return values, False
        cast, rounded = _cast(_to_mlx(values), dtype, item.tensors[number].name)
        return _as_numpy(cast), rounded

    def _arrays(self, item: Item) -> Iterator[np.ndarray | mx.array]:
        """The floats of an item, one expert after the other where they come apart."""
        for index, piece in enumerate(item.output.pieces):
            if piece.source is None:
                array = self._result(item, index)
                mx.eval(array)
                yield array
                continue
            for part in self._parts(piece.source):
                yield self._read(piece.source, part)

    def _parts(self, name: str) -> Sequence[int | None]:
        """The experts of a tensor that holds several, else the whole."""
        shape = self._source.tensors[name].shape
        several = len(shape) == 3 and math.prod(shape[1:]) >= SMALL_PART
        return range(shape[0]) if several else (None,)

    def _read(self, name: str, part: int | None = None) -> np.ndarray:
        array = self._source.read(name, part)
        logical = self._source.tensors[name]
        shape = logical.shape if part is None else logical.shape[1:]
        if array.shape != shape or not _same(array, logical.dtype):
            raise ModelFileError(
                f"{self._source.path}: {name} was read as {array.dtype} {array.shape}, not {logical.dtype} {shape}"
            )
        return array

    def _result(self, item: Item, index: int) -> mx.array:
        """A result of the model's own code; those that come next are computed with it while their inputs are small."""
        key = (item.output.name, index)
        if key not in self._computed:
            self._computed.clear()
            keys, needed = self._batch(item, index)
            given = {n: _to_mlx(self._read(n), is_float=self._source.tensors[n].dtype in FLOATS) for n in needed}
            self._computed = self._tracer.compute(keys, given)
        return self._computed.pop(key)

    def _batch(self, item: Item, index: int) -> tuple[list[Key], list[str]]:
        keys: list[Key] = []
        needed: dict[str, int] = {}
        for other in self._items[self._position[item.output.name] :]:
            start = index if other is item else 0
            for number, piece in enumerate(other.output.pieces[start:], start):
                if piece.source is not None:
                    continue
                more = {n: self._floats_bytes(n) for n in piece.inputs if n not in needed}
                if keys and sum(needed.values()) + sum(more.values()) > BATCH_BYTES:
                    return keys, list(needed)
                needed |= more
                keys.append((other.output.name, number))
        return keys, list(needed)

    def _floats_bytes(self, name: str) -> int:
        logical = self._source.tensors[name]
        return math.prod(logical.shape) * DTYPE_BYTES[logical.dtype]


def _chunks(matrix: np.ndarray | mx.array, *, rows: bool) -> Iterator[mx.array]:
    """As [rows, columns], or flat, in pieces of about CHUNK_BYTES."""
    flat: Any = matrix.reshape(-1, matrix.shape[-1]) if rows else matrix.reshape(-1)
    step = max(1, CHUNK_BYTES // max(1, flat.nbytes // max(1, len(flat))))
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        yield piece if isinstance(piece, mx.array) else _to_mlx(piece)


def _cast(chunk: mx.array, dtype: str, name: str) -> tuple[mx.array, bool]:
    """The chunk in `dtype`, and whether a value changed. Raises ConversionError for a value beyond its range."""
    before = _dtype_of(chunk)
    if before == dtype or before not in FLOATS:
        return chunk, False
    cast = chunk.astype(getattr(mx, dtype))
    if WIDTH[dtype] >= WIDTH[before] and dtype != "float16":
        return cast, False
    back = cast.astype(chunk.dtype)
    changed = mx.any(back != chunk)
    lost = mx.any(mx.isinf(back) & ~mx.isinf(chunk))
    mx.eval(cast, changed, lost)
    if lost.item():
        largest = mx.max(mx.abs(chunk)).item()
        raise ConversionError(
            f"{name} has values up to {largest:.4g}, beyond the range of {dtype}; convert with another dtype (bfloat16)"
        )
    return cast, bool(changed.item())


def _is_finite(chunk: mx.array) -> bool:
    """Whether no float is infinite or NaN. By their bits in numpy: mx.isfinite costs as much as packing."""
    bits = _as_numpy(chunk).view(np.uint32 if chunk.itemsize == 4 else np.uint16)
    exponent = bits.dtype.type(EXPONENTS[_dtype_of(chunk)])
    return bool((bits & exponent).max() != exponent)


def _to_mlx(array: np.ndarray, *, is_float: bool = True) -> mx.array:
    """An array of a reader's; of floats, uint16 stands for bfloat16."""
    result = mx.array(array)
    return result.view(mx.bfloat16) if is_float and array.dtype == np.uint16 else result


def _same(array: np.ndarray, dtype: str) -> bool:
    """Whether the array's bytes are those that `dtype` stores."""
    return str(array.dtype) == ("uint16" if dtype == "bfloat16" else dtype)


def _dtype_of(array: mx.array) -> str:
    return str(array.dtype).rpartition(".")[2]


def _as_numpy(array: mx.array) -> np.ndarray:
    """The array's memory, bfloat16 as uint16."""
    mx.eval(array)
    held = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(held, copy=False)
