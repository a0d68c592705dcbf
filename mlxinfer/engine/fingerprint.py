"""What identifies a model's keys and values: its files, and how they are run.

Weights are told apart by name, size, time and header, not read whole: gigabytes at every start would cost more than
the cache gives. So a model that is copied or touched starts with a cold cache, and weights that someone changes in
place under the same time and size are not noticed.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Literal

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import MAX_JSON_BYTES, open_regular, read_regular
from mlxinfer.formats.safetensors import MAX_HEADER_BYTES, shard_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GGUF_HEAD_BYTES = 1 << 20
_SPLIT = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf")


def fingerprint(kind: Literal["folder", "gguf"], path: Path, extra: Mapping[str, str]) -> str:
    """40 hexadecimal digits for the model at `path` under `extra`: dtype, bits of the keys, versions and so on.

    Raises ModelFileError for a file that is missing or can't be read.
    """
    digest = hashlib.sha256()
    _add(digest, kind.encode())
    if kind == "folder":
        _add(digest, read_regular(path / "config.json", MAX_JSON_BYTES) or b"")
    for file in shard_files(path) if kind == "folder" else _parts(path):
        _add_file(digest, file, kind)
    for name in sorted(extra):
        _add(digest, name.encode())
        _add(digest, extra[name].encode())
    return digest.hexdigest()[:40]


def _parts(path: Path) -> list[Path]:
    """The files of a GGUF model that may be split."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    return sorted(
        p for p in path.parent.iterdir() if (m := _SPLIT.fullmatch(p.name)) is not None and m.groups() == match.groups()
    )


def _add_file(digest: hashlib._Hash, path: Path, kind: str) -> None:
    file = open_regular(path)
    if file is None:
        raise ModelFileError(f"{path} is missing")
    try:
        with file:
            status = os.fstat(file.fileno())
            if kind == "gguf":
                head = file.read(GGUF_HEAD_BYTES)
            else:
                start = file.read(8)
                head = start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error}") from error
    _add(digest, path.name.encode())
    _add(digest, f"{status.st_size} {status.st_mtime_ns}".encode())
    _add(digest, head)


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """One part with its length, so that parts can't run into each other."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
