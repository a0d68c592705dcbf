"""Without -m, only the slice runs (tests/conformance/selection.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    beyond = [item for item in items if HERE in item.path.parents and item.get_closest_marker("slow")]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        dropped = set(beyond)
        items[:] = [item for item in items if item not in dropped]
