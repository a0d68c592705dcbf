"""The extension, built once per source into the cache; without a compiler there is nothing to test."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from typing import TYPE_CHECKING

import pytest

from mlxinfer.config import load_settings
from mlxinfer.kernels.build import BuildError, build

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    try:
        path = build(load_settings().cache_dir)
    except BuildError as error:
        pytest.skip(str(error))
    loader = importlib.machinery.ExtensionFileLoader("_kernels", str(path))
    spec = importlib.util.spec_from_loader("_kernels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
