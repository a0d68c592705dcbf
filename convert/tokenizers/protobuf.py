"""The wire format of protocol buffers, as far as a sentencepiece model needs it: fields of a message, checked."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator

Value = int | float | bytes


def fields(data: bytes, where: str) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field: varints as integers, 32-bit values as floats, the rest as bytes.

    Raises ModelFileError for lengths past the end and for wire types that no such model has.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at, where)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(data, at, where)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ModelFileError(
                f"{where}: field {number} at byte {at} has wire type {wire}; it is no sentencepiece model"
            )
        piece = data[at : at + length]
        if len(piece) < length:
            raise ModelFileError(f"{where}: field {number} at byte {at} claims {length} bytes; the file is truncated")
        at += length
        yield number, struct.unpack("<f", piece)[0] if wire == 5 else piece


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ModelFileError(f"{where}: a number at byte {at} has no end; the file is truncated or no sentencepiece model")
