"""The command line: one small file per verb, imported when the verb is run.

stdout carries data, stderr progress and messages. Exit codes: 0 ok, 1 failure, 2 usage, 3 not found or offline,
4 won't fit, 130 Ctrl-C; `mlxinfer.cli.group` maps every error onto them, in one place.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `mlxinfer` script. Ends the process."""
    # Until the verb runs there is nothing to clean up; an exception out of a half-done import may be swallowed or
    # printed by whoever imports. A handler that the caller has set (nohup, a test) stays.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _quit)
    from mlxinfer.cli.group import cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli(prog_name="mlxinfer")
    except KeyboardInterrupt:  # between the handler above and click's
        os._exit(INTERRUPTED)
    except SystemExit as ending:
        if ours and isinstance(ending.code, int):
            from mlxinfer.cli.process import settle

            settle(ending.code)
        raise


def _quit(signum: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)
