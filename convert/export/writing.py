"""Files that appear whole or not at all: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np
import psutil

from mlxinfer.errors import InvalidRequestError, MlxinferError
from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlxinfer.convert.sources.base import Handling

MARGIN = 16 << 20
"""Bytes that the disk must have free beyond the tensors: headers, tokenizer, the file system's own."""


class ExportError(MlxinferError):
    """An export could not be written, or was cancelled. Nothing of it is left."""

    code = "export_failed"


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an export."""

    name: str
    shape: tuple[int, ...]
    type: str
    """"F32", "F16", "BF16", or one of GGUF's block types."""
    nbytes: int
    sources: tuple[str, ...]
    """Parameters of the folder that it is made of."""
    handling: Handling
    note: str
    chunks: Callable[[], Iterator[np.ndarray]]
    """Its bytes in order, a piece at a time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was written, or, of a dry run, would be."""

    path: Path
    format: str
    architecture: str
    outputs: tuple[Output, ...]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)


@dataclass(slots=True)
class Meter:
    """Counts what is written, reports it, and stops where the caller has cancelled."""

    total: int
    report: Callable[[int, int], None] | None = None
    cancel: threading.Event | None = None
    done: int = 0

    def add(self, count: int) -> None:
        self.done += count
        if self.report is not None:
            self.report(self.done, self.total)
        if self.cancel is not None and self.cancel.is_set():
            raise ExportError("the export was cancelled; nothing of it is left")


def check_destination(destination: Path, nbytes: int) -> None:
    """Raises InvalidRequestError where something is in the way, ExportError where the disk is too small."""
    if os.path.lexists(destination):
        raise InvalidRequestError(f"{destination} exists already; name another destination, or remove it", param="dst")
    if not os.path.isdir(destination.parent):
        raise InvalidRequestError(f"{destination.parent} is no folder; make it first", param="dst")
    if not os.access(destination.parent, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"no permission to write in {destination.parent}", param="dst")
    try:
        os.lstat(_work_place(destination))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InvalidRequestError(f"{destination} can't be written: {error.strerror}", param="dst") from error
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes + MARGIN:
        raise ExportError(
            f"{destination} will take {human_bytes(nbytes)} and {destination.parent} has {human_bytes(free)} free; "
            f"free at least {human_bytes(nbytes + MARGIN - free)} or name a destination on another disk"
        )


def _work_place(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def appearing(destination: Path, *, folder: bool) -> Iterator[Path]:
    """A place to write to that becomes `destination` when the block ends well, and is gone when it doesn't."""
    work = _work_place(destination)
    try:
        _clear_leftovers(destination)
        if folder:
            work.mkdir()
        yield work
        if folder:
            _sync(work)
        if destination.exists():
            raise InvalidRequestError(f"{destination} has appeared meanwhile; it is left as it is", param="dst")
        work.rename(destination)
        _sync(destination.parent)
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise ExportError(f"{destination} cannot be written: {what}; nothing of it is left") from error
    finally:
        _remove(work)


def _clear_leftovers(destination: Path) -> None:
    """What an export that was killed left behind; one that still runs keeps its own."""
    mine = re.compile(rf"\.{re.escape(destination.name)}\.(\d{{1,9}})\.partial")
    for path in destination.parent.iterdir():
        if (match := mine.fullmatch(path.name)) and (
            int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))
        ):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file whose bytes are on the disk when the block ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_chunks(file: IO[bytes], output: Output, meter: Meter) -> None:
    """All of `output`, whose size is what was planned."""
    written = 0
    for chunk in output.chunks():
        file.write(np.ascontiguousarray(chunk).data)
        written += chunk.nbytes
        meter.add(chunk.nbytes)
    assert written == output.nbytes, f"{output.name}: {written} bytes instead of {output.nbytes}"
