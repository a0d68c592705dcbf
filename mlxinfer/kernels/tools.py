"""What a build takes of this machine, and what to install where something is missing."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

INSTALL = {
    "apt-get": "sudo apt-get install g++ python3-dev",
    "dnf": "sudo dnf install gcc-c++ python3-devel",
    "apk": "sudo apk add g++ python3-dev",
    "pacman": "sudo pacman -S gcc",
    "zypper": "sudo zypper install gcc-c++ python3-devel",
}
"""Package manager → what installs a compiler and Python's headers."""
COMPILERS = ("c++", "g++", "clang++")


class BuildError(Exception):
    """Why there is no extension, in one line; `fix` is the command, or the act, that mends it."""

    def __init__(self, message: str, fix: str | None = None) -> None:
        super().__init__(message)
        self.fix = fix


class BuildCancelledError(BuildError):
    """Nobody waits for the build any more."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a build takes. `compiler` is a command, `includes` are folders."""

    compiler: list[str]
    includes: list[Path]
    library: Path
    nanobind: Path


def find_tools() -> Tools:
    """The compiler, headers and libraries of this machine. Raises BuildError with what is missing."""
    compiler = find_compiler()
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise BuildError(f"Python's headers are missing ({python}/Python.h)", install_command())
    try:
        import nanobind
    except ImportError:
        raise BuildError(
            "the package nanobind is missing", f'{sys.executable} -m pip install "nanobind>=3,<4"'
        ) from None
    bound = Path(nanobind.__file__).parent
    check_abi(bound)
    root = mlx_root()
    if not (root / "include" / "mlx" / "mlx.h").is_file():
        raise BuildError(f"mlx's headers are missing ({root}/include)", f"{sys.executable} -m pip install mlx[cpu]")
    includes = [python, root / "include", bound / "include", bound / "ext" / "robin_map" / "include"]
    return Tools(compiler, includes, root / "lib", bound)


def find_compiler() -> list[str]:
    """$CXX, else the first of COMPILERS on the PATH, as a command."""
    if wanted := os.environ.get("CXX"):
        try:
            command = shlex.split(wanted)
        except ValueError:
            command = []
        if command and shutil.which(command[0]):
            return command
        raise BuildError(
            f"$CXX is {wanted!r:.100}, and there is no such compiler", "unset CXX, or name one that exists"
        )
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the PATH", install_command())


def install_command() -> str:
    """What installs a compiler here."""
    if sys.platform == "darwin":
        return "xcode-select --install"
    return next(
        (text for name, text in INSTALL.items() if shutil.which(name)), "install a C++20 compiler and Python's headers"
    )


def mlx_root() -> Path:
    """mlx's folder among the installed packages."""
    import mlx

    return Path(next(iter(mlx.__path__))).resolve()


def check_abi(nanobind: Path) -> None:
    """Raise BuildError where this nanobind would make functions that don't know mlx's arrays.

    Extensions share their types when nanobind's internals have the same version in both, and mlx's was set when its
    wheel was built.
    """
    header = nanobind / "src" / "nb_internals.h"
    here = re.search(r"NB_INTERNALS_VERSION\s+(\d+)", header.read_text(encoding="utf-8")) if header.is_file() else None
    there = {match[1] for key in shared_types() if (match := re.search(r"_v(\d+)(?:_|$)", key))}
    if here is None or not there or here[1] in there:
        return  # what can't be told beforehand shows when the extension is loaded
    version = importlib.metadata.version("nanobind")
    raise BuildError(
        f"nanobind {version} has internals of version {here[1]}, mlx was built with {' or '.join(sorted(there))}: "
        "its functions would not know mlx's arrays",
        f'{sys.executable} -m pip install --upgrade "nanobind>=3,<4"',
    )


def shared_types() -> set[str]:
    """The sets of types that extensions made with nanobind share under the name "mlx", by nanobind's keys for them.

    One when all extensions fit together: nanobind keeps them in the interpreter's own dictionary.
    """
    import mlx.core  # noqa: F401 - puts its key there

    interpreter, state = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_GetDict
    interpreter.restype, state.restype, state.argtypes = ctypes.c_void_p, ctypes.c_void_p, [ctypes.c_void_p]
    # The dictionary is lent: as a py_object result it would lose a reference with each call.
    held = ctypes.cast(state(interpreter()), ctypes.py_object).value
    return {key for key in held if isinstance(key, str) and "nanobind" in key and "mlx" in key}
