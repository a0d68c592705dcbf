"""What may lie where a file of a model is expected, and is no regular file."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ODD = ("fifo", "device", "folder")


def put_odd(path: Path, kind: str) -> Path:
    """A FIFO (opening it blocks), a link to a device that never ends, or a folder, in the place of `path`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path
