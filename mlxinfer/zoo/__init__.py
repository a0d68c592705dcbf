"""The zoo: which model a name means, where its files are, whether it fits. No mlx at import.

files = zoo.resolve("smollm2-135m", settings)      # ModelFiles: a folder or a .gguf on this machine
"""

from __future__ import annotations

from mlxinfer.zoo.cards import ModelCard, describe
from mlxinfer.zoo.checks import naming_the_conversion
from mlxinfer.zoo.entries import DEMO, CatalogEntry, catalog, find_entry
from mlxinfer.zoo.files import ModelFiles, human_bytes
from mlxinfer.zoo.fitting import FitReport, choose_default, fit
from mlxinfer.zoo.inventory import installed, remove
from mlxinfer.zoo.resolver import close_names, pull, resolve
from mlxinfer.zoo.transfer import CancelledError

__all__ = [
    "DEMO",
    "CancelledError",
    "CatalogEntry",
    "FitReport",
    "ModelCard",
    "ModelFiles",
    "catalog",
    "choose_default",
    "close_names",
    "describe",
    "find_entry",
    "fit",
    "human_bytes",
    "installed",
    "naming_the_conversion",
    "pull",
    "remove",
    "resolve",
]
