"""Where a conversion may write: checked before anything is written, and locked while it is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from mlxinfer.errors import ConversionError, InvalidRequestError
from mlxinfer.zoo.files import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEADROOM = 16 << 20
"""Bytes left free beside the result."""


def work_folder(destination: Path) -> Path:
    """The folder beside the destination in which a conversion is built up; it becomes the destination at the end."""
    return destination.with_name(f".{destination.name}.converting")


def set_aside(destination: Path) -> Path:
    """Where a destination that is replaced waits until the new one is in its place."""
    return destination.with_name(f".{destination.name}.replaced")


def problem_with(source: Path, destination: Path, *, overwrite: bool) -> str | None:
    """Why the destination can't be used, or None. Looks only."""
    try:
        return _problem_with(source, destination, overwrite=overwrite)
    except (OSError, RuntimeError) as error:
        # A folder above that may not be looked into, a name that is too long; RuntimeError: links in a circle.
        return f"{destination} can't be used: {getattr(error, 'strerror', None) or error}"


def _problem_with(source: Path, destination: Path, *, overwrite: bool) -> str | None:
    real, target = source.resolve(), destination.resolve()
    if real == target:
        return f"{destination} is the source itself; name another destination"
    if real.is_dir() and target.is_relative_to(real):
        return f"{destination} lies inside the source {source}; name another destination"
    if real.is_relative_to(target):
        return f"{destination} holds the source {source}; name another destination"
    if os.path.lexists(destination):
        if not overwrite:
            return f"{destination} exists; name another destination, or --overwrite replaces it"
        if destination.is_symlink() or not destination.is_dir():
            return f"{destination} is no folder; only a model folder is replaced"
        model = (destination / "config.json").is_file() and any(destination.glob("*.safetensors"))
        if not model and any(destination.iterdir()):
            return f"{destination} is no model folder (config.json and *.safetensors), so it is not replaced"
        if not os.access(destination, os.W_OK | os.X_OK):
            return f"no permission to delete what is in {destination}"
    parent = target.parent
    above = next((p for p in (parent, *parent.parents) if p.exists()), parent)
    if not above.is_dir():
        return f"{above} is no folder"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"no permission to write in {above}"
    with contextlib.suppress(FileNotFoundError):
        os.lstat(work_folder(target))
    return None


def check_place(source: Path, destination: Path, *, overwrite: bool) -> None:
    """Raises InvalidRequestError for a destination that can't be used."""
    if not destination.name:
        raise InvalidRequestError(f"{destination} has no name; name a folder to make", param="destination")
    if problem := problem_with(source, destination, overwrite=overwrite):
        raise InvalidRequestError(problem, param="destination")


def check_space(folder: Path, needed: int) -> None:
    """Raises ConversionError when the disk of `folder` has less than `needed` bytes and a little headroom free."""
    free = free_bytes(folder)
    if needed + HEADROOM > free:
        raise ConversionError(
            f"{human_bytes(needed)} are needed and {human_bytes(free)} are free on the disk of {folder}; "
            f"free at least {human_bytes(needed + HEADROOM - free)} or name a destination on another disk"
        )


def free_bytes(folder: Path) -> int:
    """Free on the disk that `folder`, or the nearest folder above it that exists, is on."""
    above = next(p for p in (folder, *folder.resolve().parents) if os.path.isdir(p))
    return shutil.disk_usage(above).free


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` if need be and hold it against other conversions, of this process and others.

    The folder itself is what is locked, so that nothing is left behind. Raises ConversionError when it is held.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who held it may have finished and renamed it in between.
            if _is_at(descriptor, folder):
                yield
                return
        except BlockingIOError:
            raise ConversionError(f"another conversion is writing {folder}; wait for it, or end it") from None
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(folder))
    except FileNotFoundError:
        return False


def sync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` outlast a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
