"""Find or build the extension, try it and put its kernels to use: once per process, and never an error."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from mlxinfer import runtime
from mlxinfer.kernels import calls
from mlxinfer.kernels.build import build, earlier_failure, find, home, remember_failure
from mlxinfer.kernels.checks import FAULTS, check, names
from mlxinfer.kernels.load import LoadError, check_owner, faults, load
from mlxinfer.kernels.tools import BuildCancelledError, BuildError, find_tools
from mlxinfer.types import ProgressEvent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.types import Progress

LABEL = "CPU kernels (once; a minute or two)"
ASKED_S = 60.0


@dataclass(frozen=True, slots=True)
class Status:
    """Which kernels are in use, or why there are none."""

    reason: str | None = None
    """Why there are none; None when they are in use."""
    fix: str | None = None
    """The command, or the act, that mends it, where one is known."""
    wrong: bool = False
    """They should be in use and aren't; not so where they are turned off, not needed or not built yet."""
    path: Path | None = None
    """Of the extension."""
    isa: str = ""
    """avx512, avx2, neon or base."""
    threads: int = 0
    """That work on one kernel."""
    in_use: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Kernel → why mlx's own is used in its place."""


_lock = threading.Lock()
_status: Status | None = None
_final = False
"""Whether `_status` stands for the rest of the process."""


def status() -> Status:
    """What the last `enable` came to; one that is allowed more, or finds more, may change it."""
    return _status or Status("no model was loaded yet")


def expected(settings: Settings) -> bool:
    """Whether `enable` will have kernels to put to use, as far as that can be told without building or loading any."""
    if _status is not None and _final:
        return bool(_status.in_use)
    if settings.kernels == "off" or not runtime.on_cpu():
        return False
    return _can_be_had(settings.cache_dir, home(settings.cache_dir), int(time.monotonic() / ASKED_S))


@functools.lru_cache(maxsize=4)
def _can_be_had(cache: Path, _home: Path, _time: int) -> bool:
    """For a while: this starts the compiler, twice, and a list of models asks for each of them."""
    try:
        return find(cache) is not None or (earlier_failure(cache) is None and find_tools() is not None)
    except (BuildError, *FAULTS):
        return False


def enable(
    settings: Settings,
    *,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    may_build: bool = True,
    again: bool = False,
) -> Status:
    """Put the kernels to use where mlx computes on a CPU. The first call decides for the process; from any thread.

    Building blocks for a minute or two, the first time on a machine; else it takes half a second. `may_build`: without
    it, an extension that isn't there yet stays away. `again`: a build that failed is tried again. Ctrl-C is all that is
    raised.
    """
    global _status, _final
    with _lock:
        if _status is None or not _final or (again and _status.reason):
            _can_be_had.cache_clear()
            _status, _final = _enable(settings, progress, cancel, may_build, again)
        return _status


def _enable(
    settings: Settings, progress: Progress | None, cancel: threading.Event | None, may_build: bool, again: bool
) -> tuple[Status, bool]:
    """The status, and whether it stands for the rest of the process."""
    if settings.kernels == "off":
        return Status("turned off by the setting kernels"), False
    if not runtime.on_cpu():
        return Status("not needed: mlx computes on the GPU"), True
    try:
        path = find(settings.cache_dir)
        if path is None and not may_build:
            if failure := earlier_failure(settings.cache_dir):
                raise failure
            return Status("not built yet; built on first use, or now with --build-kernels"), False
        return _use(settings, path, progress, cancel, may_build, again), True
    except BuildCancelledError as error:
        return Status(str(error)), False
    except BuildError as error:
        return Status(str(error), error.fix, wrong=True), True
    except FAULTS as error:
        return Status(f"{type(error).__name__}: {error}", wrong=True), True


def _use(
    settings: Settings,
    path: Path | None,
    progress: Progress | None,
    cancel: threading.Event | None,
    may_build: bool,
    again: bool,
) -> Status:
    def steps(done: int, total: int) -> None:
        if progress is not None:
            progress(ProgressEvent("build", done, total, LABEL))

    cached = path is not None
    if path is None:
        path = build(settings.cache_dir, steps, cancel=cancel, again=again)
    try:
        return _put_to_use(path)
    except LoadError as error:
        if cached and may_build:
            # The file was damaged after it was built, or came from another machine: one made here may be better.
            path = build(settings.cache_dir, steps, cancel=cancel, again=True)
            with contextlib.suppress(LoadError):
                return _put_to_use(path)
        if may_build:
            # Not to be tried, and built again, at every start.
            remember_failure(path.parent, str(error))
            path.unlink(missing_ok=True)
        raise


def _put_to_use(path: Path) -> Status:
    check_owner(path)
    left_out = faults(path)
    extension = load(path)
    for name in names(extension):
        if name not in left_out and (why := check(extension, name)):
            left_out[name] = why
    in_use = tuple(name for name in names(extension) if name not in left_out)
    calls.install(extension, in_use)
    with contextlib.suppress(OSError):
        os.utime(path)  # of the builds in the cache, those that are used stay
    return Status(
        path=path, isa=extension.isa(), threads=extension.threads(), in_use=in_use, left_out=MappingProxyType(left_out)
    )
