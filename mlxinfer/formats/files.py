"""Reading a file that a stranger may have made: a regular file, and no more of it than a limit."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import IO, TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON_BYTES = 64 * 2**20


def open_regular(path: Path) -> IO[bytes] | None:
    """A regular file, open for reading, or None when there is no file of that name.

    A FIFO would block for ever, and a device claims a size of 0 and never ends; neither is opened for long. Raises
    ModelFileError for anything that is no regular file or can't be opened.
    """
    try:
        # O_NONBLOCK so that opening a FIFO returns; it changes nothing for a regular file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be opened: {error}") from error
    # Before `open`, which keeps the descriptor of a directory that it refuses.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelFileError(f"{path} is no regular file")
    return open(descriptor, "rb")


def read_regular(path: Path, limit: int) -> bytes | None:
    """The bytes of a regular file, or None when there is no file of that name.

    Raises ModelFileError as `open_regular` does, for a file of more than `limit` bytes, or one that can't be read.
    """
    file = open_regular(path)
    if file is None:
        return None
    with file:
        try:
            data = file.read(limit + 1)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error}") from error
    if len(data) > limit:
        raise ModelFileError(f"{path} has more than {limit} bytes, the most that is read")
    return data


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """A JSON object from a model's file, or None when there is no such file. Raises ModelFileError otherwise."""
    data = read_regular(path, limit)
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}; an object is expected")
    return value


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8, for a file. Halves of surrogate pairs, which a stranger's JSON may hold, stay escapes."""
    # Of text between quotes, what UTF-8 can't hold becomes \ud800: JSON's own escape.
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a small file whole: under another name first, synced, then renamed. Raises OSError, the old one kept.

    `mode` is what it may be used for, less the process's mask.
    """
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
