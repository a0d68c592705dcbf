"""Where the members of an uncompressed zip archive are: enough of the format for what torch.save writes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from mlxinfer.convert.sources.store import DataFile

MAX_DIRECTORY_BYTES = 64 << 20
MAX_MEMBERS = 250_000
_END, _END64, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_LOCAL, _CENTRAL = b"PK\x03\x04", b"PK\x01\x02"
_MANY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """A stored file: its size and where its local header begins."""

    header: int
    nbytes: int


def members(file: DataFile) -> dict[str, Member]:
    """By name. Raises ModelFileError for an archive that is broken, compressed or encrypted."""
    where, size = str(file.path), file.stat.st_size
    offset, length, count = _directory(file, where, size)
    if length > MAX_DIRECTORY_BYTES or count > MAX_MEMBERS or offset + length > size:
        raise ModelFileError(f"{where}: a zip directory of {count} members, {length} bytes at {offset}, is not read")
    raw = file.span(offset, length, where).tobytes()
    found: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        name, member, at = _entry(raw, at, where)
        if name in found:
            raise ModelFileError(f"{where}: the zip directory has {name!r:.120} twice")
        found[name] = member
    return found


def data_offset(file: DataFile, name: str, member: Member) -> int:
    """Where the bytes of a member begin. Raises ModelFileError when they leave the file."""
    where, size = f"{file.path}: {name}", file.stat.st_size
    if member.header + 30 > size:
        raise ModelFileError(f"{where} begins at byte {member.header} of {size}; the file is truncated")
    header = file.span(member.header, 30, where).tobytes()
    name_length, extra_length = struct.unpack_from("<HH", header, 26)
    start = member.header + 30 + name_length + extra_length
    if header[:4] != _LOCAL or start + member.nbytes > size:
        raise ModelFileError(f"{where} has no {member.nbytes} bytes at {start}; the file is truncated or corrupt")
    return start


def _directory(file: DataFile, where: str, size: int) -> tuple[int, int, int]:
    """(offset, bytes, members) of the central directory."""
    tail_length = min(size, 22 + 0xFFFF)
    tail = file.span(size - tail_length, tail_length, where).tobytes()
    at = tail.rfind(_END)
    if at < 0 or at + 22 > len(tail):
        raise ModelFileError(f"{where}: no end of a zip archive; the file is truncated or was not made by torch.save")
    count, length, offset = struct.unpack_from("<HII", tail, at + 10)
    if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR:
        (place,) = struct.unpack_from("<Q", tail, at - 12)
        if place + 56 > size:
            raise ModelFileError(f"{where}: the zip64 directory at byte {place} is past the end")
        record = file.span(place, 56, where).tobytes()
        if record[:4] != _END64:
            raise ModelFileError(f"{where}: no zip64 directory at byte {place}")
        count, length, offset = struct.unpack_from("<QQQ", record, 32)
    return offset, length, count


def _entry(raw: bytes, at: int, where: str) -> tuple[str, Member, int]:
    if raw[at : at + 4] != _CENTRAL or at + 46 > len(raw):
        raise ModelFileError(f"{where}: the zip directory is broken at its byte {at}")
    flags, method = struct.unpack_from("<HH", raw, at + 8)
    packed, plain, name_length, extra_length, comment_length = struct.unpack_from("<IIHHH", raw, at + 20)
    (header,) = struct.unpack_from("<I", raw, at + 42)
    end = at + 46 + name_length + extra_length + comment_length
    if end > len(raw):
        raise ModelFileError(f"{where}: the zip directory is broken at its byte {at}")
    name = raw[at + 46 : at + 46 + name_length].decode("utf-8", "replace")
    if flags & 1 or method != 0:
        raise ModelFileError(f"{where}: {name!r:.120} is compressed or encrypted, which torch.save never does")
    extra = raw[at + 46 + name_length : at + 46 + name_length + extra_length]
    packed, plain, header = _wide(extra, [plain, packed, header], where, name)
    if packed != plain:
        raise ModelFileError(f"{where}: {name!r:.120} has {packed} bytes stored and {plain} plain; they must agree")
    return name, Member(header, plain), end


def _wide(extra: bytes, values: list[int], where: str, name: str) -> tuple[int, int, int]:
    """(stored bytes, plain bytes, header), taken from the zip64 field where 32 bits don't hold them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wanted = [i for i, value in enumerate(values) if value == _MANY]
            if length < 8 * len(wanted) or at + 4 + length > len(extra):
                raise ModelFileError(f"{where}: the zip64 sizes of {name!r:.120} are broken")
            for place, i in enumerate(wanted):
                (values[i],) = struct.unpack_from("<Q", extra, at + 4 + 8 * place)
        at += 4 + length
    plain, packed, header = values
    return packed, plain, header
