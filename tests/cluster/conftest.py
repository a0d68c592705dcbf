"""Ranks that the tests of this folder share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.clusters import Lent

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lent() -> Iterator[dict[int, Lent]]:
    """Ranks by their number, for one model after the other."""
    made = {size: Lent(size) for size in (2, 3, 4)}
    try:
        yield made
    finally:
        for ranks in made.values():
            ranks.close()
