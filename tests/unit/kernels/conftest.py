"""The extension, built once per source into the cache; without a compiler there is nothing to test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.config import load_settings
from mlxinfer.kernels import calls
from mlxinfer.kernels.build import build
from mlxinfer.kernels.load import load
from mlxinfer.kernels.tools import BuildError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    try:
        return load(build(load_settings().cache_dir))
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="package", autouse=True)
def _mlx_own_functions() -> Iterator[None]:
    """mx.fast.rms_norm and its kin are mlx's own here, to compare with; elsewhere the kernels are in their places."""
    before = calls.in_use()
    calls.uninstall()
    yield
    calls.put(before)
