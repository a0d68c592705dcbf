"""Where the packaged program starts: the command line, and without arguments, as on a double click, the app."""

from __future__ import annotations

import multiprocessing
import sys


def arguments(given: list[str]) -> list[str]:
    """What the command line is to see. Finder may add a process number of its own."""
    kept = [argument for argument in given if not argument.startswith("-psn_")]
    return kept if len(kept) > 1 else [*kept, "app"]


def main() -> None:
    multiprocessing.freeze_support()
    if sys.argv[1:2] == ["-c"]:  # the kernels are tried in a process of their own, by what runs this one
        sys.argv, code = ["-c", *sys.argv[3:]], sys.argv[2]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = arguments(sys.argv)
    from mlxinfer.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
