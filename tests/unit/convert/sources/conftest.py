from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.convert.sources import checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _sources_are_closed() -> Iterator[None]:
    yield
    while checkpoints.OPEN:
        checkpoints.OPEN.pop().close()
