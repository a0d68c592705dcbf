"""Values out of a model's JSON files, each of them bounded; the messages name file and key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SIZE = 1 << 24
"""Of any one axis; the largest published vocabulary has some 260,000 entries."""


class Values:
    """A JSON object of the file `where`, read with checks. Raises ModelFileError from every method."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def size(self, *keys: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` to MAX_SIZE under the first of `keys` that is there."""
        key, value = self._first(keys, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value <= MAX_SIZE:
            raise self.error(key, value, f"a whole number from {least} to {MAX_SIZE}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """A finite number above 0."""
        key, value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def word(self, *keys: str, default: str | None = None) -> str:
        key, value = self._first(keys, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self.error(key, value, "a word")
        return value

    def error(self, key: str, value: object, wanted: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {key} is {value!r:.80}; it must be {wanted}")

    def _first(self, keys: tuple[str, ...], default: object) -> tuple[str, Any]:
        return next(((k, self.values[k]) for k in keys if self.values.get(k) is not None), (keys[0], default))
