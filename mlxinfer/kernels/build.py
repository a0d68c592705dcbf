"""Compile the extension into the cache: by whichever C++ compiler is there, against the mlx that is installed.

A folder per build, `kernels/<sources and mlx>-<compiler>/_kernels.so`, filled under a lock and by one rename. A failed
build is a reason in words, never an error.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from mlxinfer.kernels.compiling import COMMON, SOURCES, compile_extension, extra_flags, instruction_sets
from mlxinfer.kernels.tools import BuildCancelledError, BuildError, Tools, find_tools, mlx_root

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    Steps = Callable[[int, int], None]
    """Gets files done and files in all."""

NAME = "_kernels.so"
FAILED = "failed.txt"
KEPT = 3
"""Builds that stay: of several environments with different mlx versions, say."""
WAIT_SECONDS = 1200.0
"""For the build of another process."""
RETRY_SECONDS = 86400.0
"""A build that failed is not tried again at each start, but after a day, or when asked for."""


def home(cache: Path) -> Path:
    """Where builds lie: MLXINFER_KERNELS_DIR, else `kernels` in the cache."""
    return Path(os.environ.get("MLXINFER_KERNELS_DIR") or cache / "kernels")


def identity() -> str:
    """Changes whenever another extension is needed, whoever compiles it."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    # The folder of mlx is part of it: the extension finds libmlx by this path.
    facts = [
        importlib.metadata.version("mlx"), str(mlx_root()), sysconfig.get_config_var("SOABI") or "", platform.machine(),
        repr(instruction_sets()), repr(COMMON), repr(extra_flags()),
    ]  # fmt: skip
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:16]


def compiler_identity(tools: Tools) -> str:
    """Changes with the compiler and with nanobind."""
    try:
        said = subprocess.run(
            [*tools.compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=30, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{tools.compiler[0]} can't be run: {error}") from error
    facts = [*tools.compiler, *said.splitlines()[:1], importlib.metadata.version("nanobind")]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:8]


def find(cache: Path) -> Path | None:
    """The extension, when it was built: by this machine's compiler, or by any where there is none any more."""
    own = identity()
    try:
        compiler = compiler_identity(find_tools())
    except BuildError:
        compiler = "*"
    found = [path for path in home(cache).glob(f"{own}-{compiler}/{NAME}") if path.is_file()]
    return max(found, key=_used, default=None)


def earlier_failure(cache: Path) -> BuildError | None:
    """Why the build failed, when that was lately."""
    folder = home(cache) / f"{identity()}-{compiler_identity(find_tools())}"
    file = folder / FAILED
    try:
        if 0 <= time.time() - file.stat().st_mtime < RETRY_SECONDS:
            why = file.read_text(encoding="utf-8", errors="replace")
            return BuildError(f"the build failed earlier: {why}", "mlxinfer doctor --build-kernels   (tries it again)")
    except FileNotFoundError:
        pass
    return None


def build(
    cache: Path,
    progress: Steps | None = None,
    *,
    cancel: threading.Event | None = None,
    again: bool = False,
) -> Path:
    """The extension's path, built when it isn't there yet. Blocks, a minute or two on two cores.

    `again`: also where it is there, or failed lately. Raises BuildError; whatever ends it, Ctrl-C included, no compiler
    goes on and nothing half-made stays.
    """
    tools = find_tools()
    progress = progress or (lambda done, total: None)
    place = home(cache)
    folder = place / f"{identity()}-{compiler_identity(tools)}"
    target = folder / NAME
    before = _stamp(target)
    if before is not None and not again:
        return target
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(place / ".lock", progress, cancel):
            # Another process may have been here while this one waited.
            if _stamp(target) not in ((None, before) if again else (None,)):
                return target
            if not again and (failure := earlier_failure(cache)):
                raise failure
            _sweep_leftovers(place)
            _make(tools, place, target, progress, cancel)
            _sweep_old(place, keep=folder)
    except OSError as error:
        raise BuildError(f"{place} can't be written: {error.strerror or error}", _writable_fix(error)) from error
    return target


def _make(tools: Tools, place: Path, target: Path, progress: Steps, cancel: threading.Event | None) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=place, ignore_cleanup_errors=True) as work:
        try:
            made = compile_extension(tools, Path(work), progress, cancel)
        except BuildCancelledError:
            raise
        except BuildError as error:
            remember_failure(target.parent, str(error))
            raise
        target.parent.mkdir(exist_ok=True, mode=0o700)
        os.replace(made, target)
    (target.parent / FAILED).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path, progress: Steps, cancel: threading.Event | None) -> Iterator[None]:
    """The system lets go of the lock when its holder dies, however that was.

    Not so on a disk without flock, where a file that stays behind stands for the lock: the wait has an end.
    """
    lock = FileLock(path)
    until = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            progress(0, 1)  # it is another process that builds
            if cancel is not None and cancel.is_set():
                raise BuildCancelledError("the build was cancelled") from None
            if time.monotonic() > until:
                why = f"another process holds {path} since {WAIT_SECONDS:.0f} s"
                raise BuildError(why, f"rm {path}   (when no other mlxinfer builds)") from None
    try:
        yield
    finally:
        lock.release()


def remember_failure(folder: Path, why: str) -> None:
    """For later starts: a build that takes a minute to fail isn't tried at each of them."""
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / FAILED).write_text(why, encoding="utf-8")


def _sweep_leftovers(place: Path) -> None:
    """Folders of builds whose process was killed; under the lock, so none of them is at work."""
    for folder in place.glob(".build-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _sweep_old(place: Path, keep: Path) -> None:
    others = [folder for folder in place.glob("*-*") if folder.is_dir() and folder != keep]
    for folder in sorted(others, key=lambda f: _used(f / NAME), reverse=True)[KEPT - 1 :]:
        shutil.rmtree(folder, ignore_errors=True)


def _used(path: Path) -> float:
    """When a build was made or last loaded; 0 for one that isn't there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells one file at this path from the next."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else None


def _writable_fix(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space: mlxinfer ls, then mlxinfer rm MODEL"
    name = "MLXINFER_KERNELS_DIR" if os.environ.get("MLXINFER_KERNELS_DIR") else "MLXINFER_CACHE_DIR"
    return f"set {name} to a folder that you can write to"
