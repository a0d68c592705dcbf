"""What every download shares: progress, cancelling, room on the disk and the errors of a full one."""

from __future__ import annotations

import contextlib
import errno
import shutil
from typing import TYPE_CHECKING

from mlxinfer.errors import DownloadError
from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.types import Progress, ProgressEvent

HEADROOM = 64 << 20
"""Bytes left free beside a download, so that it does not fill the disk to the last block."""


class CancelledError(DownloadError):
    """The caller set the cancel event; what arrived so far is kept for a resume."""

    exit_code = 130
    code = "cancelled"


def report(progress: Progress | None, event: ProgressEvent) -> None:
    if progress is not None:
        progress(event)


def check_cancelled(cancel: threading.Event | None, label: str) -> None:
    if cancel is not None and cancel.is_set():
        raise CancelledError(f"the download of {label} was cancelled; what arrived is kept where it can be resumed")


def check_space(folder: Path, needed: int) -> None:
    """Raise DownloadError when the disk of `folder` has not `needed` bytes and a little headroom free."""
    free = shutil.disk_usage(folder).free
    if needed + HEADROOM > free:
        raise DownloadError(
            f"{human_bytes(needed)} are needed and {human_bytes(free)} are free on the disk of {folder}; "
            f"free at least {human_bytes(needed + HEADROOM - free)} (see `mlxinfer ls` and `mlxinfer rm`)"
        )


@contextlib.contextmanager
def locked(path: Path, cancel: threading.Event | None, label: str) -> Iterator[None]:
    """Hold the lock file `path`: one thread of one process at a time writes what it stands for, the others wait."""
    from huggingface_hub.utils import WeakFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        while True:
            check_cancelled(cancel, label)
            try:
                stack.enter_context(WeakFileLock(path, timeout=0.5))
            except TimeoutError:
                continue
            break
        yield


@contextlib.contextmanager
def disk_errors(label: str, needed: int, *, resumes: bool = True) -> Iterator[None]:
    """Map what the file system says, a full disk first of all, onto DownloadError."""
    try:
        yield
    except OSError as error:
        where = error.filename or "the model store"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            rest = "what arrived is kept, and the same command goes on from there" if resumes else "nothing was kept"
            raise DownloadError(
                f"the disk filled up while {label} was written ({human_bytes(needed)} in all, at {where}); {rest}: "
                f"free some space and run it again"
            ) from error
        raise DownloadError(f"{label} cannot be written to {where}: {error.strerror or error}") from error
