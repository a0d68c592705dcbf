"""Typed access to metadata: a missing, mistyped or absurd value is an error that names the key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeVar

from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from mlxinfer.formats.gguf.reader import GGUFFile

T = TypeVar("T")


class Fields:
    """The metadata of one file. Keys that start with a dot belong to the architecture: ".block_count"."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file

    def key(self, name: str) -> str:
        return self.file.architecture + name if name.startswith(".") else name

    def fail(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {self.key(name)} {problem}")

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An int within the bounds; per-layer lists are accepted when all layers agree."""
        value = self._same_for_all_layers(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"is {value!r:.40}; it must be an integer")
        if not low <= value <= high:
            raise self.fail(name, f"is {value}; it must be between {low} and {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number within the bounds."""
        value = self._same_for_all_layers(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, f"is {value!r:.40}; it must be a number")
        if not math.isfinite(value) or not low <= value <= high:
            raise self.fail(name, f"is {value}; it must be between {low:g} and {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.file.metadata.get(self.key(name), default)
        if not isinstance(value, bool):
            raise self.fail(name, f"is {value!r:.40}; it must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.file.metadata.get(self.key(name), default)
        if value is not None and not isinstance(value, str):
            raise self.fail(name, f"is {value!r:.40}; it must be a string")
        return value

    def sequence(self, name: str, kind: type[T]) -> list[T] | None:
        """A list whose elements are all of `kind`; None when the key is absent."""
        value = self.file.metadata.get(self.key(name))
        if value is None:
            return None
        if not isinstance(value, list) or any(type(v) is not kind for v in value):
            raise self.fail(name, f"must be a list of {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def _same_for_all_layers(self, name: str, default: float | None) -> object:
        key = self.key(name)
        value = self.file.metadata.get(key, default)
        if value is None:
            raise self.fail(name, "is missing")
        if isinstance(value, list):
            if not value:
                raise self.fail(name, "is an empty list")
            if any(v != value[0] for v in value):
                raise UnsupportedModelError(
                    f"{self.file.path}: {key} differs from layer to layer; that is not supported"
                )
            return value[0]
        return value
