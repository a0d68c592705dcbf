"""The folder of a run: it can be written, a run would write over nothing in it, and no other run is at work there."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora import checkpoint
from mlxinfer.lora.adapter import CONFIG, WEIGHTS
from mlxinfer.lora.card import CARD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOG = "log.jsonl"
REPORT = "report.html"
WRITTEN = (WEIGHTS, CONFIG, CARD, REPORT)
"""What a run leaves beside its log and its checkpoints."""


def check_folder(folder: Path, *, resume: bool, param: str = "output") -> None:
    """Leaves nothing behind. Raises InvalidRequestError where the folder can't be made or written, for the checkpoints
    of a run that isn't resumed, and for files that no checkpoint beside them explains: they would be lost.
    """
    try:
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
        if new:
            folder.rmdir()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequestError(f"{folder!s:.160}: no folder can be made there: {why}", param=param) from error
    if not writable:
        raise InvalidRequestError(f"{folder}: it may not be written", param=param)
    if checkpoint.checkpoints(folder / checkpoint.FOLDER):
        if not resume:
            message = f"{folder} holds the checkpoints of a run: resume it, or use another folder"
            raise InvalidRequestError(message, param=param)
        return
    held = [name for name in WRITTEN if (folder / name).exists()]
    log = folder / LOG
    if not resume and log.is_file() and log.stat().st_size:
        held.append(LOG)
    if held:
        message = (
            f"{folder} holds {', '.join(held)}, and no checkpoint: a run would write over them. Use another folder"
        )
        raise InvalidRequestError(message, param=param)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other run may begin in `folder`. Raises InvalidRequestError where one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        message = f"{folder}: another run is at work there; wait for its end, or use another folder"
        raise InvalidRequestError(message, param="output") from error
    except OSError:  # a file system without locks
        return
