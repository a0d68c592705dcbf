"""Log lines from a thread of their own: a reader that stalls, or a disk that is full, holds no request up."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 10_000
"""Lines that may wait to be written; beyond that they are dropped and counted."""
CLOSE_S = 1.0


class LineHandler(logging.Handler):
    """Writes to a stream, or appends to a file, which it opens anew when another program has moved it away."""

    def __init__(self, target: TextIO | Path, *, level: int, fmt: str = "%(message)s") -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter(fmt))
        self.dropped = 0
        self._path = target if isinstance(target, Path) else None
        self._stream = _open(target) if isinstance(target, Path) else target
        self._lines: queue.Queue[str | None] = queue.Queue(CAPACITY)
        self._thread = threading.Thread(target=self._run, name="mlxinfer-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what waits, for a second at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._path is not None and not self._thread.is_alive():
            self._stream.close()
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError, ValueError):  # a log that cannot be written is no reason to stop
                self._follow()
                self._stream.write(line + "\n")
                self._stream.flush()

    def _follow(self) -> None:
        if self._path is None:
            return
        ours = os.fstat(self._stream.fileno())
        try:
            there = os.stat(self._path)
            moved = (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)
        except FileNotFoundError:
            moved = True
        if moved:
            fresh = _open(self._path)
            self._stream.close()
            self._stream = fresh


def _open(path: Path) -> TextIO:
    return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8")


@contextlib.contextmanager
def logging_to(access_log: str | None) -> Iterator[None]:
    """For a `with` block: warnings go to stderr, and the access log to "stderr" (also "-") or to a file; None: nowhere.

    Raises InvalidRequestError when the file cannot be written.
    """
    access = logging.getLogger("mlxinfer.access")
    level = access.level
    with contextlib.ExitStack() as stack:
        warnings = LineHandler(sys.stderr, level=logging.WARNING, fmt="%(levelname)s: %(message)s")
        stack.callback(warnings.close)
        for name in ("mlxinfer", "uvicorn"):
            _attach(stack, logging.getLogger(name), warnings)
        if access_log is not None:
            handler = _access_handler(access_log)
            stack.callback(handler.close)
            _attach(stack, access, handler)
            access.setLevel(logging.INFO)
            stack.callback(access.setLevel, level)
        yield


def _attach(stack: contextlib.ExitStack, logger: logging.Logger, handler: logging.Handler) -> None:
    logger.addHandler(handler)
    stack.callback(logger.removeHandler, handler)


def _access_handler(where: str) -> LineHandler:
    try:
        return LineHandler(sys.stderr if where in ("stderr", "-") else Path(where), level=logging.INFO)
    except OSError as error:
        raise InvalidRequestError(
            f"the access log {where} cannot be written: {error.strerror}; name a file, stderr or off",
            param="access_log",
        ) from error
