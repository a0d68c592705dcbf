"""Progress on stderr: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING

from mlxinfer.cli import output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress as Bars
    from rich.progress import ProgressColumn, Task, TaskID

    from mlxinfer.types import Progress, ProgressEvent

VERB = {
    "resolve": "Looking up",
    "download": "Downloading",
    "verify": "Checking",
    "unpack": "Unpacking",
    "build": "Building",
    "load": "Loading",
    "write": "Writing",
}
COUNTED = ("download", "verify", "unpack", "write")
"""Phases whose bytes are worth a bar."""
IN_FILES = ("build",)
"""Phases that count files."""
PLAIN_INTERVAL = 5.0
"""Seconds between two plain lines about one file."""


@contextlib.contextmanager
def reporting() -> Iterator[Progress]:
    """A Progress callback, thread-safe, whose bars are gone when the block ends."""
    if not output.decorates(sys.stderr):
        yield PlainProgress()
        return
    bars = BarProgress()
    try:
        yield bars
    finally:
        bars.close()


class PlainProgress:
    """One line when a file begins, then at most one every few seconds, and none twice in a row; a build has one.

    Lines that count bytes say the time left, at the mean speed since the first event about the file.
    """

    def __init__(self, write: Callable[[str], None] = output.say, clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._last: dict[tuple[str, str], tuple[float, str]] = {}
        self._began: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()

    def __call__(self, event: ProgressEvent) -> None:
        if event.phase == "resolve":
            return
        with self._lock:
            key, now = (event.phase, event.label), self._clock()
            if event.phase in IN_FILES and key in self._last:
                return
            before, said = self._last.get(key, (now - PLAIN_INTERVAL, ""))
            if now - before < PLAIN_INTERVAL or (text := line(event)) == said:
                return
            self._last[key] = now, text
            self._write(text + self._left(event, key, now))

    def _left(self, event: ProgressEvent, key: tuple[str, str], now: float) -> str:
        began, at_first = self._began.setdefault(key, (now, event.done))
        moved = event.done - at_first
        if event.phase not in COUNTED or not event.total or moved <= 0 or event.done >= event.total:
            return ""
        from mlxinfer.zoo.files import human_seconds

        return f", {human_seconds((event.total - event.done) * (now - began) / moved)} left"


def line(event: ProgressEvent) -> str:
    """For example "Downloading model.gguf: 12.0 MB of 98.5 MB (12 %)" or "Loading model (98.5 MB)"."""
    from mlxinfer.zoo.files import human_bytes

    text = f"{VERB[event.phase]} {event.label}".rstrip()
    if event.phase in IN_FILES:
        return f"{text} … {event.done}/{event.total}" if event.done else f"{text} …"
    if event.total and event.phase not in COUNTED:
        return f"{text} ({human_bytes(event.total)})"
    if event.total:
        done, total = human_bytes(event.done), human_bytes(event.total)
        return f"{text}: {done} of {total} ({100 * event.done // event.total} %)"
    return f"{text}: {human_bytes(event.done)}" if event.done else text


class BarProgress:
    """rich's bars, one per phase and file; what has no bytes to count is a pulse until the next thing begins."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._lock = threading.Lock()

    def __call__(self, event: ProgressEvent) -> None:
        with self._lock:
            bars = self._started()
            total = event.total if event.phase in (*COUNTED, *IN_FILES) else None
            key = (event.phase, event.label)
            if key not in self._tasks:
                for task in bars.tasks:
                    task.visible = task.total is not None
                text = f"{VERB[event.phase]} {output.printable(event.label)}"
                self._tasks[key] = bars.add_task(text, total=total, in_files=event.phase in IN_FILES)
            bars.update(self._tasks[key], completed=event.done if total else 0, total=total)

    def close(self) -> None:
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def _started(self) -> Bars:
        """rich is imported at the first event: a verb that fetches nothing does not pay for it."""
        if self._bars is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._bars = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                *_byte_columns(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        return self._bars


def _byte_columns() -> tuple[ProgressColumn, ...]:
    """Bytes, speed and time left, empty for a task without a total; of one that counts files, how many."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        def render(self, task: Task) -> Text:
            if task.fields["in_files"]:
                return Text(f"{task.completed:.0f}/{task.total or 0:.0f}")
            return Text() if task.total is None else super().render(task)

    class Speed(TransferSpeedColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None or task.fields["in_files"] else super().render(task)

    class Left(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    return Bytes(), Speed(), Left()
