"""`python -m mlxinfer` is `mlxinfer`."""

from __future__ import annotations

from mlxinfer.cli import main

if __name__ == "__main__":
    main()
