"""Bring a built extension into this process, after it has shown in another that it ends neither.

A file that is truncated, foreign or wrong for this processor can crash whoever loads it. So each one is loaded and
tried in a process of its own first; a file beside it says that this was done, and for which bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import stat
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from mlxinfer.kernels.compiling import signal_name
from mlxinfer.kernels.tools import BuildError, shared_types

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

VERIFIED = "verified.json"
TRIAL_SECONDS = 120.0
REFUSED = 3
"""How the process ends that tried an extension and could not load it."""
_TRIAL = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from mlxinfer.kernels.trial import main; main()"


class LoadError(BuildError):
    """Why an extension that was built can't be used. A new build may be better."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "mlxinfer doctor --build-kernels")


@cache
def load(path: Path) -> ModuleType:
    """The extension as a module. Raises LoadError; may end the process when the file was never tried."""
    before = shared_types()
    loader = importlib.machinery.ExtensionFileLoader("_kernels", str(path))
    spec = importlib.util.spec_from_loader("_kernels", loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError, SystemError) as error:
        raise LoadError(f"{path} can't be loaded: {error}") from error
    if shared_types() - before:
        raise LoadError("the extension does not know mlx's arrays: another version of nanobind's internals than mlx's")
    return module


def check_owner(path: Path) -> None:
    """Raise BuildError for a file that others could have put there: it is code, and runs as this user.

    Neither the file nor the folders of its build and of all builds may be another user's, root aside, or be open to
    others' writing; in a folder with the sticky bit those can't touch what isn't theirs.
    """
    if not hasattr(os, "geteuid"):
        return
    users, groups = {0, os.geteuid()}, {0, os.getegid(), *os.getgroups()}
    for place in (path, path.parent, path.parent.parent):
        found = place.stat()
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid not in users:
            fix = f"rm {place}" if place is path else "set MLXINFER_KERNELS_DIR to a folder of your own"
            raise BuildError(f"{place} belongs to another user", fix)
        if place is not path and mode & stat.S_ISVTX:
            continue
        if mode & stat.S_IWOTH:
            raise BuildError(f"{place}: every user may change it", _shut(path, place))
        if mode & stat.S_IWGRP and found.st_gid not in groups:
            raise BuildError(f"{place}: a group that isn't yours may change it", _shut(path, place))


def _shut(path: Path, place: Path) -> str:
    """What others may have changed is thrown away, not just closed to them."""
    return f"rm {path}" if place is path else f"rm {path} && chmod go-w {place}"


def faults(path: Path) -> dict[str, str]:
    """Kernel → how it ended the process that tried it; those must not be called. Raises LoadError.

    Tried once per file and instruction set; where that can't be written down, each time.
    """
    facts = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "isa": os.environ.get("MLXINFER_KERNELS_ISA", "")}
    marker = path.parent / VERIFIED
    known: Any = None
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(marker.read_text(encoding="utf-8"))
    if isinstance(known, dict) and facts.items() <= known.items() and isinstance(known.get("faults"), dict):
        return {str(name): str(why) for name, why in known["faults"].items()}
    found = _try(path)
    with contextlib.suppress(OSError):
        part = marker.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(facts | {"faults": found}), encoding="utf-8")
        os.replace(part, marker)
    return found


def _try(path: Path) -> dict[str, str]:
    """Load and check the extension in a process of its own, again without each kernel that ends it."""
    found: dict[str, str] = {}
    while True:
        command = [sys.executable, "-c", _TRIAL, json.dumps(sys.path), str(path), *found]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=TRIAL_SECONDS, check=False,
            )  # fmt: skip
            code, said = done.returncode, done.stdout
            last = (done.stderr.splitlines() or ["no output"])[-1][:300]
            why = signal_name(-code) if code < 0 else f"{code}: {last}"
        except subprocess.TimeoutExpired as error:
            code, said = -1, error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
            why = last = f"nothing for {TRIAL_SECONDS:.0f} s"
        except OSError as error:
            raise LoadError(f"{sys.executable} can't be run to try {path}: {error.strerror}") from error
        if code == 0:
            return found
        if code == REFUSED:
            raise LoadError(last)
        at_work = said.splitlines()[-1] if said else ""
        if not at_work or at_work in found:
            raise LoadError(f"the process that tried {path} ended with {why}")
        found[at_work] = f"the process that tried it ended with {why}"
