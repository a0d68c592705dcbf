"""Files and folders of the disk tier: private, atomic, and cleaned up after a process that was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

from mlxinfer.engine.disk_format import BodyDigest, StoredArray, body_pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SUFFIX = ".kv"
TEMP_SUFFIX = ".tmp"
STALE_S = 86_400.0
"""A temporary file of this age is abandoned even where locks don't work."""


class StoredFile(NamedTuple):
    """An entry's file, by the time of its last use."""

    mtime_ns: int
    path: Path
    nbytes: int


def make_private(folder: Path) -> None:
    """Make `folder` if there is none, and let nobody but its owner in. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    if stat.S_IMODE(os.stat(folder).st_mode) != 0o700:
        os.chmod(folder, 0o700)


def stored_files(folder: Path) -> list[StoredFile]:
    """The entries in `folder`, the longest unused first; links and anything else are left alone."""
    found: list[StoredFile] = []
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in items:
            # A file may go while its folder is read.
            with contextlib.suppress(OSError):
                if item.name.endswith(SUFFIX) and item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    found.append(StoredFile(status.st_mtime_ns, folder / item.name, status.st_size))
    return sorted(found)


def subfolders(folder: Path) -> list[Path]:
    """The real folders in `folder`."""
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        return [folder / item.name for item in items if item.is_dir(follow_symlinks=False)]
    return []


def write_file(path: Path, arrays: Sequence[StoredArray], head_bytes: int, head_of: Callable[[bytes], bytes]) -> None:
    """Write an entry so that `path` is the old file or the whole new one, whatever happens. Raises OSError.

    `head_of` makes the `head_bytes` before the body from the body's digest, so each array is passed over once.
    """
    temp = path.with_name(secrets.token_hex(8) + TEMP_SUFFIX)
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            # The lock says that this process lives; `remove_abandoned` asks for it.
            with _no_locks_here():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            digest = BodyDigest()
            at = head_bytes
            for piece in body_pieces(arrays):
                digest.update(piece)
                at += _write_at(descriptor, piece, at)
            head = head_of(digest.digest())
            assert len(head) == head_bytes
            _write_at(descriptor, memoryview(head), 0)
            os.fsync(descriptor)
            os.rename(temp, path)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    _sync(path.parent)


def _write_at(descriptor: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        # macOS takes less than 2 GiB at a time.
        done += os.pwrite(descriptor, data[done : done + (64 << 20)], offset + done)
    return done


def _sync(folder: Path) -> None:
    """Make a rename last, where folders can be synchronised."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_abandoned(folder: Path) -> int:
    """Remove temporary files whose writer is gone; those of a living process stay. Returns how many went."""
    removed = 0
    with contextlib.suppress(OSError), os.scandir(folder) as items:
        for item in list(items):
            if item.name.endswith(TEMP_SUFFIX) and item.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    if _is_abandoned(folder / item.name):
                        os.unlink(folder / item.name)
                        removed += 1
    return removed


def _is_abandoned(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(descriptor).st_mtime > STALE_S
    finally:
        os.close(descriptor)
    return True


@contextlib.contextmanager
def _no_locks_here() -> Iterator[None]:
    """Some network file systems have no locks; then age decides what is abandoned."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError:
        pass
