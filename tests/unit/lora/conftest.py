"""A base that runs by name can be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import tiny

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_folder(tmp_path_factory.mktemp("base") / "tiny")
