"""A reader of little-endian values that never asks for more than the file has, nor for more than a header may have."""

from __future__ import annotations

import struct
from typing import IO

from mlxinfer.errors import ModelFileError

MAX_HEADER_BYTES = 64 * 2**20
"""Metadata and tensor table together; the largest vocabularies need about 20 MB."""
MAX_STRING_BYTES = 16 * 2**20
MAX_ARRAY_LENGTH = 2**22
"""Elements of one metadata array; the largest merge lists have about 600,000."""

# GGUF value types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9


class Cursor:
    """Sequential reads from `file`, which has `size` bytes. Every error names the file and the field being read."""

    def __init__(self, file: IO[bytes], name: str, size: int) -> None:
        self._file = file
        self._name = name
        self.size = size
        self.position = 0

    def fail(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._name}: {field}: {problem} (at byte {self.position} of {self.size})")

    def take(self, count: int, field: str) -> bytes:
        """The next `count` bytes."""
        end = self.position + count
        if end > self.size:
            raise self.fail(field, f"needs {count} bytes and the file ends; it is truncated or corrupt")
        if end > MAX_HEADER_BYTES:
            raise self.fail(field, f"the header is longer than {MAX_HEADER_BYTES} bytes")
        data = self._file.read(count)
        if len(data) != count:
            raise self.fail(field, "the file became shorter while it was read")
        self.position = end
        return data

    def u32(self, field: str) -> int:
        return int.from_bytes(self.take(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.take(8, field), "little")

    def text(self, field: str, limit: int = MAX_STRING_BYTES) -> str:
        """A length-prefixed UTF-8 string of at most `limit` bytes."""
        length = self.u64(field)
        if length > limit:
            raise self.fail(field, f"a string of {length} bytes; at most {limit}")
        try:
            return self.take(length, field).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(field, f"not valid UTF-8: {error.reason}") from error

    def value(self, kind: int, field: str) -> object:
        """One metadata value: bool, int, float, str or a list of those."""
        if kind == ARRAY:
            return self._array(field)
        if kind == STRING:
            return self.text(field)
        if kind == BOOL:
            return self._bools(1, field)[0]
        return self._numbers(kind, 1, field)[0]

    def _array(self, field: str) -> list[object]:
        kind, count = self.u32(field), self.u64(field)
        if kind == ARRAY:
            raise self.fail(field, "an array of arrays; no reader of GGUF supports that")
        if count > MAX_ARRAY_LENGTH:
            raise self.fail(field, f"an array of {count} elements; at most {MAX_ARRAY_LENGTH}")
        if kind == BOOL:
            return list(self._bools(count, field))
        if kind != STRING:
            return list(self._numbers(kind, count, field))
        if count * 8 > self.size - self.position:
            raise self.fail(field, f"an array of {count} strings does not fit into the file")
        return [self.text(field) for _ in range(count)]

    def _numbers(self, kind: int, count: int, field: str) -> tuple[int | float, ...]:
        code = SCALARS.get(kind)
        if code is None:
            raise self.fail(field, f"value type {kind} is unknown; the known ones are 0 to 12")
        return struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code), field))

    def _bools(self, count: int, field: str) -> list[bool]:
        raw = self.take(count, field)
        if any(b > 1 for b in raw):
            raise self.fail(field, f"a bool of value {max(raw)}; it must be 0 or 1")
        return [b == 1 for b in raw]
