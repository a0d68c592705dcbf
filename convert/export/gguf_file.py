"""A GGUF file, version 3, written front to back: header, metadata, tensor table, tensors.

The `gguf` package's writer keeps every tensor, in memory or in a temporary file, until all are known; here sizes are
known from the plan, so that one slice of one tensor is in memory at a time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from gguf.constants import GGMLQuantizationType as Kind
from gguf.constants import GGUFValueType as Type

from mlxinfer.convert.export.writing import Meter, Output, write_chunks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALIGNMENT = 32
_CODES = {Type.UINT32: "<I", Type.INT32: "<i", Type.FLOAT32: "<f", Type.BOOL: "<?"}


@dataclass(frozen=True, slots=True)
class Value:
    """One entry of metadata; a list is an array of `type`."""

    type: Type
    value: object

    def encoded(self) -> bytes:
        if isinstance(self.value, list):
            items = b"".join(_plain(self.type, item) for item in self.value)
            return struct.pack("<IIQ", Type.ARRAY, self.type, len(self.value)) + items
        return struct.pack("<I", self.type) + _plain(self.type, self.value)


def u32(value: int) -> Value:
    return Value(Type.UINT32, value)


def f32(value: float) -> Value:
    return Value(Type.FLOAT32, value)


def boolean(value: bool) -> Value:
    return Value(Type.BOOL, value)


def string(value: str) -> Value:
    return Value(Type.STRING, value)


def strings(values: Sequence[str]) -> Value:
    return Value(Type.STRING, list(values))


def _plain(kind: Type, value: object) -> bytes:
    if kind == Type.STRING:
        assert isinstance(value, str)
        raw = value.encode("utf-8", errors="surrogatepass")
        return struct.pack("<Q", len(raw)) + raw
    return struct.pack(_CODES[kind], value)


def write_gguf(file: IO[bytes], metadata: Mapping[str, Value], outputs: Sequence[Output], meter: Meter) -> None:
    """`outputs` have GGUF's own tensor names and types; shapes are row-major, as everywhere here."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(outputs), len(metadata))
    file.write(head)
    position = len(head)
    for key, value in metadata.items():
        position += file.write(_plain(Type.STRING, key) + value.encoded())
    offset = 0
    for output in outputs:
        sides = struct.pack(f"<I{len(output.shape)}Q", len(output.shape), *output.shape[::-1])
        entry = _plain(Type.STRING, output.name) + sides + struct.pack("<IQ", Kind[output.type], offset)
        position += file.write(entry)
        offset += output.nbytes + _padding(output.nbytes)
    file.write(bytes(_padding(position)))
    for output in outputs:
        write_chunks(file, output, meter)
        file.write(bytes(_padding(output.nbytes)))


def _padding(position: int) -> int:
    return -position % ALIGNMENT
