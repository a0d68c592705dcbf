"""What one parameter of a model is made of: rows of tensors of the file, joined and put in another order.

llama.cpp joins, splits and permutes matrices by whole rows, and blocks never cross rows, so that all of it happens on
the file's own bytes: codes and scales move with their row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.blocks import PACKED, Layout, float_rows, packed_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlxinfer.formats.gguf.reader import GGUFTensor

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
"""Types of which single elements can be had: a vector counts as rows of one element."""

PackedRows = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""Words, scales and biases, as blocks.packed_rows."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter under mlx-lm's name.

    The rows of `tensors` (of the last two dimensions) follow one another; `order` picks those that make the parameter.
    With three dimensions every expert is made so.
    """

    name: str
    shape: tuple[int, ...]
    tensors: tuple[GGUFTensor, ...]
    order: Callable[[int], np.ndarray] | None = None
    """Number of rows to the indices of those taken, in their new order."""
    function: Callable[[np.ndarray], np.ndarray] | None = None
    """Applied to the floats, element by element."""
    factor: GGUFTensor | None = None
    """One float for the whole, or one for each expert, that the values have to be multiplied with."""
    note: str = ""

    @property
    def layout(self) -> Layout | None:
        """How the whole can be had packed."""
        kinds = {t.type for t in self.tensors}
        if len(self.shape) < 2 or len(kinds) > 1 or self.function is not None or self.factor is not None:
            return None
        layout = PACKED.get(next(iter(kinds)))
        return layout if layout is not None and self.shape[-1] % layout.group_size == 0 else None

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def experts(self) -> int:
        """1 for what has no experts."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def floats(self, part: int | None = None) -> np.ndarray:
        """float32, the whole or one expert of it. Raises ModelFileError or UnsupportedModelError."""
        shape = self.shape if part is None else self.shape[1:]
        pieces = [f for i in self._parts(part) for f in self._floats(i, self._rows(i), math.inf)]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).reshape(shape)

    def packed(self, part: int | None = None) -> PackedRows:
        """The whole or one expert of it; `layout` says how. Raises ModelFileError."""
        shape = (self.shape if part is None else self.shape[1:])[:-1]
        pieces = [packed_rows(self.tensors[0], self._rows(i)[0]) for i in self._parts(part)]
        words, scales, biases = (
            None if column[0] is None else np.concatenate(column).reshape(*shape, -1)
            for column in zip(*pieces, strict=True)
        )
        assert words is not None
        assert scales is not None
        return words, scales, biases

    def float_slices(self, rows: int) -> Iterator[np.ndarray]:
        """`floats` in pieces of so many rows."""
        for i in self._parts(None):
            yield from self._floats(i, self._rows(i), rows)

    def packed_slices(self, rows: int) -> Iterator[PackedRows]:
        """`packed` in pieces of so many rows."""
        for i in self._parts(None):
            raw = self._rows(i)[0]
            for start in range(0, raw.shape[0], rows):
                yield packed_rows(self.tensors[0], raw[start : start + rows])

    def _parts(self, part: int | None) -> range:
        return range(self.experts) if part is None else range(part, part + 1)

    def _rows(self, part: int) -> list[np.ndarray]:
        """The bytes of one expert's rows in their order: one array, or where types differ one for each tensor."""
        raws = [self._read(tensor, part) for tensor in self.tensors]
        if len({t.type for t in self.tensors}) == 1:
            joined = raws[0] if len(raws) == 1 else np.concatenate(raws)
            return [joined if self.order is None else joined[self.order(joined.shape[0])]]
        return raws

    def _read(self, tensor: GGUFTensor, part: int) -> np.ndarray:
        if self.experts > 1:
            rows = tensor.shape[-2]
            return tensor.read(part * rows, rows)
        raw = tensor.read()
        if len(self.shape) == 1 and tensor.type.name in ELEMENT_BYTES:
            return raw.reshape(-1, ELEMENT_BYTES[tensor.type.name])
        if len(self.shape) == 1 and self.order is not None:
            raise UnsupportedModelError(
                f"{tensor.path}: the elements of {tensor.name} have to be moved, which type {tensor.type.name} forbids"
            )
        return raw

    def _floats(self, part: int, raws: list[np.ndarray], rows: float) -> Iterator[np.ndarray]:
        """(rows, columns) of one expert, at most `rows` at a time, where the order allows."""
        if len(raws) == len(self.tensors) > 1:
            whole = np.concatenate([float_rows(t, raw) for t, raw in zip(self.tensors, raws, strict=True)])
            yield self._finished(part, whole if self.order is None else whole[self.order(whole.shape[0])])
            return
        raw = raws[0]
        step = int(min(rows, raw.shape[0]))
        for start in range(0, raw.shape[0], step):
            yield self._finished(part, float_rows(self.tensors[0], raw[start : start + step]))

    def _finished(self, part: int, values: np.ndarray) -> np.ndarray:
        if self.factor is not None:
            factors = float_rows(self.factor, self.factor.read()).reshape(-1)
            if factors.size not in (1, self.experts):
                raise ModelFileError(f"{self.factor.path}: tensor {self.factor.name} has {factors.size} numbers")
            values = values * factors[part % factors.size]
        return values if self.function is None else self.function(values).astype(np.float32)


def halves_apart(heads: int, rotated: int | None = None) -> Callable[[int], np.ndarray]:
    """Undo llama.cpp's row order of q and k: within a head, rows 0, 2, 4, … first, then 1, 3, 5, …

    `rotated`: only so many of a head's rows have been moved.
    """

    def order(rows: int) -> np.ndarray:
        head = np.arange(rows).reshape(heads, -1)
        turned = head[:, :rotated] if rotated is not None else head
        rest = head[:, turned.shape[1] :]
        return np.concatenate([turned[:, 0::2], turned[:, 1::2], rest], axis=1).reshape(-1)

    return order


def between(start: int, stop: int) -> Callable[[int], np.ndarray]:
    """Some rows of a tensor that holds several matrices."""
    return lambda rows: np.arange(rows)[start:stop]
