"""System prompts that are kept by name: one JSON file beside the conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError
from mlxinfer.formats.files import json_bytes, read_json_object, replace_file

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 4 << 20
MAX_NAME = 80
FILE = "presets.json"
MODE = 0o600


class Presets:
    """Read again at each use: two windows may change it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def all(self) -> dict[str, str]:
        """Name → text, in alphabetical order. Raises ModelFileError for a file that is no such."""
        held = read_json_object(self._path, MAX_BYTES) or {}
        return {name: text for name, text in sorted(held.items()) if isinstance(text, str)}

    def save(self, name: str, text: str) -> None:
        """Raises InvalidRequestError for a name or a size that can't be."""
        name = " ".join(name.split())
        if not name or len(name) > MAX_NAME:
            raise InvalidRequestError(
                f"a preset's name has 1 to {MAX_NAME} characters, not {len(name)}", param="preset"
            )
        self._write(self.all() | {name: text})

    def delete(self, name: str) -> None:
        """Nothing happens where there is none of that name."""
        held = self.all()
        if held.pop(name, None) is not None:
            self._write(held)

    def _write(self, held: dict[str, str]) -> None:
        data = json_bytes(held, indent=1)
        if len(data) > MAX_BYTES:
            raise InvalidRequestError(f"the presets together are larger than {MAX_BYTES >> 20} MiB", param="preset")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(self._path, data, mode=MODE)
        except OSError as error:
            raise InvalidRequestError(f"{self._path} cannot be written: {error.strerror}", param="preset") from error
