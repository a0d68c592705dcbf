"""The edges of the process: standard streams that are missing or full, and an end that does not wait for a load."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

_loads_cut_off = False


class OutputError(OSError):
    """stdout cannot be written: a full disk, a terminal that went away. `strerror` says why."""


class Output(io.TextIOWrapper):
    """stdout whose errors tell themselves apart from those of any other file. A reader that left stays a pipe error."""

    def write(self, text: str, /) -> int:
        with _as_output_error():
            return super().write(text)

    def flush(self) -> None:
        with _as_output_error():
            super().flush()


@contextlib.contextmanager
def _as_output_error() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


def prepare_streams() -> None:
    """Give the process the three streams it can write to.

    Python sets a stream to None whose descriptor was closed (`mlxinfer ls >&-`); /dev/null stands in for it. A model
    writes any character; a terminal that cannot show one gets `?`, not a traceback.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:
            # In this order each takes the lowest free number, its own, so that no file opened later is written to.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
            if name == "stdout" and type(stream) is io.TextIOWrapper:
                sys.stdout = _guarded(stream)


def _guarded(out: io.TextIOWrapper) -> Output:
    return Output(
        out.buffer,
        encoding=out.encoding,
        errors=out.errors,
        line_buffering=out.line_buffering,
        write_through=out.write_through,
    )


def discard(stream: Any) -> None:
    """Send what `stream` still holds, and all that follows, to /dev/null: Python flushes once more on exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextlib.contextmanager
def cut_off_by_signals() -> Iterator[None]:
    """Around a load: Ctrl-C and SIGTERM that end it are remembered for `end`."""
    global _loads_cut_off
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _loads_cut_off = True
        raise


def a_load_was_cut_off() -> bool:
    return _loads_cut_off


def quit_on_signals(*, terminated: int, interrupted: int) -> None:
    """From now on SIGTERM and SIGINT end the process at once, with these codes: only cleaning up is left to be cut off.

    As exceptions they would come up in finalizers, which print them.
    """
    for number, code in ((signal.SIGTERM, terminated), (signal.SIGINT, interrupted)):
        signal.signal(number, lambda *_, code=code: os._exit(code))


def settle(code: int) -> None:
    """The exit code is known: no signal that still comes changes it."""
    quit_on_signals(terminated=code, interrupted=code)
    atexit.register(_ignore_signals)


def _ignore_signals() -> None:
    # The interpreter gives handlers back to the system when it goes away, but leaves these alone.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end(code: int) -> NoReturn:
    """End the process.

    A load that was cut off goes on in the MLX thread, for seconds or minutes, and a regular exit waits for it there:
    mlx aborts when the interpreter goes away under it. Nothing is to be saved then, so the process ends at once.
    """
    if _loads_cut_off:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
