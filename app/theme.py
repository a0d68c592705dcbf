"""Light or dark, as it was chosen with the page's switch: a word in a file beside the conversations.

What a browser keeps is by address, and the port is another at each start; the window's browser keeps nothing at all.
The page learns the word by a cookie that the link brings (app/door.py).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError
from mlxinfer.formats.files import json_bytes, read_json_object, replace_file

if TYPE_CHECKING:
    from pathlib import Path

FILE = "theme.json"
COOKIE = "mlxinfer_theme"
THEMES = ("light", "dark")


def read(folder: Path) -> str:
    """One of THEMES; "" where none was chosen, or the file holds anything else: the system's holds then."""
    try:
        chosen = (read_json_object(folder / FILE, limit=4096) or {}).get("theme")
    except (ModelFileError, OSError):  # colours are not worth a word to the user
        return ""
    return chosen if chosen in THEMES else ""


def write(folder: Path, theme: str) -> None:
    """Keep what was chosen. A disk that is full or read-only costs that, nothing else."""
    assert theme in THEMES
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / FILE, json_bytes({"theme": theme}))
