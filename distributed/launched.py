"""`python -m mlxinfer.distributed.launched MARK SCRIPT …`: a script as a rank of `mlx.launch`, that tells how it ended.

mlx.launch ends with 0 whatever became of its ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback


def main() -> None:
    """Run a script, or with -m a module, and write "MARK RANK CODE" to stderr at its end."""
    mark, *command = sys.argv[1:]
    code = 1
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - the process's edge
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.write(f"{mark} {os.environ.get('MLX_RANK', '?')} {code}\n")
    sys.stderr.flush()
    # A rank that failed may hold collectives that nobody answers.
    os._exit(code)


if __name__ == "__main__":
    main()
