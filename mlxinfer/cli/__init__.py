"""The command line: one small file per verb, imported when the verb is run.

stdout carries data, stderr progress and messages. Exit codes: 0 ok, 1 failure, 2 usage, 3 not found or offline,
4 won't fit, 130 Ctrl-C; `mlxinfer.cli.group` maps every error onto them, in one place.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `mlxinfer` script. Ends the process."""
    try:
        from mlxinfer.cli.group import cli

        cli(prog_name="mlxinfer")
    except KeyboardInterrupt:  # while importing; later click and the group take care of it
        sys.exit(130)
