"""The terminal's echo, turned off while something else writes."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """What is typed while bars or a reply are written is kept for the next prompt, and not mixed into the text."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (termios.error, OSError, ValueError):  # stdin is no terminal
        yield
        return
    quiet = list(before)
    quiet[3] &= ~termios.ECHO
    _set(descriptor, quiet)
    try:
        yield
    finally:
        _set(descriptor, before)


def _set(descriptor: int, attributes: list[object]) -> None:
    # A job in the background that changes the terminal is stopped by the kernel.
    with contextlib.suppress(OSError, termios.error):
        if os.tcgetpgrp(descriptor) == os.getpgrp():
            termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)  # pyright: ignore[reportArgumentType]
