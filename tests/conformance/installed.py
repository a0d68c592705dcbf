"""What the installed mlx-lm has: its architectures and the names that lead to them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pkgutil

import mlx_lm.models
from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING


@functools.cache
def architectures() -> tuple[str, ...]:
    """Every module of mlx_lm.models with a Model class, and those that refuse to be imported."""
    found: list[str] = []
    for info in pkgutil.iter_modules(mlx_lm.models.__path__):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = importlib.import_module(f"mlx_lm.models.{info.name}")
        except (ImportError, SystemExit):
            found.append(info.name)
            continue
        if hasattr(module, "Model"):
            found.append(info.name)
    return tuple(found)


def aliases(module: str) -> list[str]:
    """Other model_types that mlx-lm loads with this module."""
    renamed = [name for name, target in MODEL_REMAPPING.items() if target == module]
    return sorted(renamed + [f"{t} ({a})" for (t, a), m in MODEL_ARCHITECTURE_REMAPPING.items() if m == module])
