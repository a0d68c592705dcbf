"""The process in which an extension is tried before others load it: `main` prints each kernel before it calls it."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxinfer.kernels.checks import check, names
from mlxinfer.kernels.load import REFUSED, LoadError, load


def main() -> None:
    """Arguments: sys.path as JSON, the extension's path, kernels to leave out."""
    _, path, *without = sys.argv[1:]
    try:
        extension = load(Path(path))
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(REFUSED)
    for name in names(extension):
        if name not in without:
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
            check(extension, name)
