"""Pools over fake loads and a fake clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.pool.fake import FakeClock, FakeLoads, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.pool import ModelPool


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def made(clock: FakeClock) -> Iterator[Any]:
    """Makes pools, closes them and looks whether anything went wrong on their threads."""
    made: list[tuple[ModelPool, FakeLoads]] = []

    def build(sizes: dict[str, int], **options: Any) -> tuple[ModelPool, FakeLoads]:
        made.append(make(sizes, clock, **options))
        return made[-1]

    yield build
    for pool, loads in made:
        pool.close()
        assert not loads.wrong
